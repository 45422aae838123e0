import copy
from typing import Any

import pytest
import torch
from torch import nn

from agentloop.config.learning import OptimizerSection
from agentloop.learning.optimizer import WeightOptimizer, learning_rate


def rates(count: int, **settings: Any) -> list[float]:
    section = OptimizerSection(learning_rate=1.0, **settings)
    return [learning_rate(section, iteration=i, iterations=count) for i in range(1, count + 1)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "constant"}, [1, 1, 1, 1, 1]),
        ({"schedule": "linear", "final_factor": 0.2}, [1, 0.8, 0.6, 0.4, 0.2]),
        ({"schedule": "cosine", "final_factor": 0.0}, [1, 0.8535534, 0.5, 0.1464466, 0]),
        ({"schedule": "linear", "final_factor": 0.0, "warmup_iterations": 2}, [1 / 3, 2 / 3, 1, 0.5, 0]),
        ({"schedule": "constant", "warmup_iterations": 9}, [0.1, 0.2, 0.3, 0.4, 0.5]),
    ],
)
def test_learning_rate_follows_its_schedule(settings: dict[str, Any], expected: list[float]) -> None:
    assert rates(5, **settings) == pytest.approx(expected, abs=1e-7)


def test_learning_rate_of_a_run_of_one_iteration_and_beyond_the_end() -> None:
    assert rates(1) == [1.0]
    section = OptimizerSection(learning_rate=1.0, schedule="linear", final_factor=0.1)
    assert learning_rate(section, iteration=50, iterations=5) == pytest.approx(0.1)


def layer(dtype: torch.dtype = torch.float32, value: float = 1.0) -> nn.Linear:
    model = nn.Linear(3, 1, bias=False, dtype=dtype)
    nn.init.constant_(model.weight, value)
    return model


def train(model: nn.Linear, optimizer: WeightOptimizer, steps: int) -> None:
    for step in range(steps):
        model(torch.full((2, 3), 1.0 + step, dtype=model.weight.dtype)).sum().backward()
        optimizer.step(optimizer.gradient_norm())


def test_gradients_are_scaled_down_to_the_largest_norm_allowed() -> None:
    # AdamW's first step hides the scale of its gradient, so look at the moment: (1 - 0.9) x clipped gradient.
    model = layer()
    optimizer = WeightOptimizer(model, OptimizerSection(max_grad_norm=0.5))
    model.weight.grad = torch.tensor([[3.0, 0.0, 4.0]])
    assert optimizer.gradient_norm() == 5.0
    optimizer.step(5.0)
    torch.testing.assert_close(optimizer.state()["weight/exp_avg"], torch.tensor([[0.03, 0.0, 0.04]]))
    assert model.weight.grad is None


def test_gradients_below_the_largest_norm_are_left_alone() -> None:
    model = layer()
    optimizer = WeightOptimizer(model, OptimizerSection(max_grad_norm=50.0))
    model.weight.grad = torch.tensor([[3.0, 0.0, 4.0]])
    optimizer.step(5.0)
    torch.testing.assert_close(optimizer.state()["weight/exp_avg"], torch.tensor([[0.3, 0.0, 0.4]]))


def test_half_precision_weights_take_steps_smaller_than_their_spacing() -> None:
    model = layer(torch.bfloat16)
    optimizer = WeightOptimizer(model, OptimizerSection(learning_rate=1e-3, max_grad_norm=1e9))
    train(model, optimizer, 1)
    assert model.weight.tolist() == [[1.0] * 3]  # the next number below 1 is 0.9961
    train(model, optimizer, 9)
    # Ten steps of 0.001 down: 0.99, and bfloat16's nearest is 0.98828125 or 0.9921875.
    assert model.weight.tolist() == [[0.98828125] * 3] or model.weight.tolist() == [[0.9921875] * 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_round_trip_continues_bit_for_bit(dtype: torch.dtype) -> None:
    section = OptimizerSection(learning_rate=1e-3, weight_decay=0.1)
    model = layer(dtype)
    optimizer = WeightOptimizer(model, section)
    train(model, optimizer, 3)
    other = copy.deepcopy(model)
    saved = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    train(model, optimizer, 3)

    resumed = WeightOptimizer(other, section)
    resumed.load_state(saved)
    train(other, resumed, 3)
    assert torch.equal(model.weight, other.weight)
    left, right = optimizer.state(), resumed.state()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_state_before_the_first_step_is_loaded_as_such() -> None:
    optimizer = WeightOptimizer(layer(), OptimizerSection())
    assert optimizer.state() == {}
    model = layer()
    used = WeightOptimizer(model, OptimizerSection())
    train(model, used, 1)
    used.load_state({})
    assert used.state() == {}


def test_state_of_another_model_is_refused() -> None:
    optimizer = WeightOptimizer(layer(), OptimizerSection())
    with pytest.raises(ValueError, match="a parameter 'head' it lacks"):
        optimizer.load_state({"head/exp_avg": torch.zeros(1, 3)})
    with pytest.raises(ValueError, match=r"must have shape \[1, 3\], got \[4\]"):
        optimizer.load_state({"weight/exp_avg": torch.zeros(4)})
