import copy
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import MambaConfig, MambaForCausalLM

from agentloop.config.sections.optimization import OptimizerSection
from agentloop.learning.optimizer import WeightOptimizer, hidden_matrices, learning_rate
from agentloop.models.actor import Actor
from agentloop.models.critic import Critic
from tests.fakes.ranks import group_of_one
from tests.fakes.tiny_actors import tiny_actor


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
    section = OptimizerSection(learning_rate=1.0, **settings)
    assert [learning_rate(section, iteration=i, iterations=5) for i in range(1, 6)] == pytest.approx(expected, abs=1e-7)


def layer(dtype: torch.dtype = torch.float32, value: float = 1.0) -> nn.Linear:
    model = nn.Linear(3, 1, bias=False, dtype=dtype)
    nn.init.constant_(model.weight, value)
    return model


def test_gradients_are_scaled_down_to_the_largest_norm_allowed() -> None:
    # AdamW's first step hides the scale of its gradient, so look at the moment: (1 - 0.9) x clipped gradient.
    model = layer()
    optimizer = WeightOptimizer(model, OptimizerSection(max_grad_norm=0.5))
    model.weight.grad = torch.tensor([[3.0, 0.0, 4.0]])
    assert optimizer.gradient_norm() == 5.0
    optimizer.step(5.0)
    torch.testing.assert_close(optimizer.state()["weight/adamw.exp_avg"], torch.tensor([[0.03, 0.0, 0.04]]))
    assert model.weight.grad is None


# Every optimizer

NAMES = ("adamw", "sgd", "muon")


def section(name: str, **options: Any) -> OptimizerSection:
    return OptimizerSection.model_validate({"name": name, "learning_rate": 0.01, "weight_decay": 0.1, **options})


def small(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Two hidden matrices between an embedding and a head of one row, with a bias and a norm."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3, bias=False))
    model.append(nn.Linear(3, 1, bias=False))
    return model.to(dtype)


MATRICES = frozenset({"1.weight", "3.weight"})


def give_gradients(model: nn.Module, seed: int) -> None:
    """Of numbers that bfloat16 has."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape).bfloat16().to(parameter.dtype)


def step(model: nn.Module, optimizer: WeightOptimizer, seeds: range) -> None:
    for seed in seeds:
        give_gradients(model, seed)
        optimizer.step(optimizer.gradient_norm())


Memory = dict[str, torch.Tensor]


def adamw_step(p: torch.Tensor, g: torch.Tensor, memory: Memory, t: int) -> torch.Tensor:
    memory["m"] = 0.9 * memory.get("m", 0.0) + 0.1 * g
    memory["v"] = 0.95 * memory.get("v", 0.0) + 0.05 * g**2
    update = (memory["m"] / (1 - 0.9**t)) / ((memory["v"] / (1 - 0.95**t)).sqrt() + 1e-8)
    return p * (1 - 0.01 * 0.1) - 0.01 * update


def sgd_step(p: torch.Tensor, g: torch.Tensor, memory: Memory, t: int) -> torch.Tensor:
    memory["m"] = 0.95 * memory.get("m", 0.0) + (g + 0.1 * p)
    return p - 0.01 * memory["m"]


def muon_step(p: torch.Tensor, g: torch.Tensor, memory: Memory, t: int) -> torch.Tensor:
    """Nesterov's momentum, five Newton-Schulz iterations, and steps of the size of AdamW's."""
    memory["m"] = 0.95 * memory.get("m", 0.0) + 0.05 * g
    x = 0.05 * g + 0.95 * memory["m"]
    x = x / x.norm()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return p * (1 - 0.01 * 0.1) - 0.01 * 0.2 * max(p.shape) ** 0.5 * x


@pytest.mark.parametrize(
    ("name", "by_hand", "tolerance"),
    [
        ("adamw", adamw_step, 1e-12),
        ("sgd", sgd_step, 1e-12),
        # Newton-Schulz is made in bfloat16, of steps that are at most 0.01 x 0.2 x sqrt(6) x 1.3 = 0.006 large.
        ("muon", muon_step, 2e-4),
    ],
)
def test_steps_are_those_written_by_hand(name: str, by_hand: Any, tolerance: float) -> None:
    model = small()
    optimizer = WeightOptimizer(model, section(name, max_grad_norm=1e9))
    expected = {key: p.detach().clone() for key, p in model.named_parameters()}
    memories: dict[str, Memory] = {key: {} for key in expected}
    for t in range(1, 4):
        give_gradients(model, t)
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None
            rule = adamw_step if name == "muon" and key not in MATRICES else by_hand
            expected[key] = rule(expected[key], parameter.grad, memories[key], t)
        optimizer.step(optimizer.gradient_norm())
    for key, parameter in model.named_parameters():
        allowed = tolerance if key in MATRICES else 1e-12
        torch.testing.assert_close(parameter.detach(), expected[key], rtol=0.0, atol=allowed)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_weights_are_those_of_float32_rounded(name: str) -> None:
    half, single = small(torch.bfloat16), small(torch.bfloat16).float()
    for model in (half, single):
        step(model, WeightOptimizer(model, section(name, learning_rate=1e-3, max_grad_norm=1e9)), range(8))
    for (key, rounded), parameter in zip(half.named_parameters(), single.parameters(), strict=True):
        assert torch.equal(rounded, parameter.bfloat16()), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [*({"name": name} for name in NAMES), {"name": "sgd", "momentum": 0.0}])
def test_state_round_trip_continues_bit_for_bit(options: dict[str, Any], dtype: torch.dtype) -> None:
    model = small(dtype)
    optimizer = WeightOptimizer(model, section(**options))
    step(model, optimizer, range(3))
    other = copy.deepcopy(model)
    saved = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    step(model, optimizer, range(3, 6))

    resumed = WeightOptimizer(other, section(**options))
    resumed.load_state(saved)
    step(other, resumed, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    left, right = optimizer.state(), resumed.state()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_state_of_another_optimizer_or_model_is_refused() -> None:
    for name in NAMES:
        optimizer = WeightOptimizer(model := small(), section(name))
        step(model, optimizer, range(1))
        for other in {*NAMES} - {name}:
            with pytest.raises(ValueError, match=f"optimizer state must be that of {other} for this model, got "):
                WeightOptimizer(small(), section(other)).load_state(optimizer.state())
    with pytest.raises(ValueError, match="for this model, got head/adamw.exp_avg"):
        WeightOptimizer(layer(), OptimizerSection()).load_state({"head/adamw.exp_avg": torch.zeros(1, 3)})


def test_muon_moves_hidden_matrices_and_adamw_the_rest() -> None:
    assert hidden_matrices(small()) == MATRICES
    model = tiny_actor().model
    in_layers = {f"model.layers.{i}.{name}" for i in range(2) for name in PROJECTIONS}
    assert hidden_matrices(model) == in_layers
    # A value head is one row.
    of_critic = hidden_matrices(Critic(Actor(model)).weights)
    assert of_critic == {name.replace("model.", "backbone.") for name in in_layers}
    # A table of decays is [32, 4] and no matrix; the projection to them is one column.
    config = MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
    of_mixer = {f"backbone.layers.0.mixer.{name}_proj.weight" for name in ("in", "x", "out")}
    assert hidden_matrices(MambaForCausalLM(config)) == of_mixer


PROJECTIONS = [f"self_attn.{n}_proj.weight" for n in "qkvo"] + [f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")]


# Weights sharded over ranks


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[DeviceMesh]:
    with group_of_one(tmp_path) as mesh:
        yield mesh


def sharded(mesh: DeviceMesh, dtype: torch.dtype) -> nn.Sequential:
    model = small(dtype)
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    return model


def learn(model: nn.Module, optimizer: WeightOptimizer, times: int) -> list[float]:
    norms = []
    for _ in range(times):
        (model(torch.arange(5)) ** 2).sum().backward()
        norms.append(optimizer.gradient_norm())
        optimizer.step(norms[-1])
    return norms


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_sharded_weights_are_moved_like_whole_ones(one_rank: DeviceMesh, name: str, dtype: torch.dtype) -> None:
    plain, model = small(dtype), sharded(one_rank, dtype)
    alone, optimizer = (WeightOptimizer(m, section(name, max_grad_norm=0.5)) for m in (plain, model))
    assert learn(model, optimizer, 3) == learn(plain, alone, 3)
    state = optimizer.state()
    assert all(isinstance(value, DTensor) or field.endswith(".step") for field, value in state.items())
    found = {field: whole(value).tolist() for field, value in state.items()}
    assert found == {field: value.tolist() for field, value in alone.state().items()}
    # What one machine saved goes on in shards, and so does what was sharded.
    for saved in (alone.state(), state):
        resumed = sharded(one_rank, dtype)
        set_model_state_dict(resumed, plain.state_dict(), options=StateDictOptions(full_state_dict=True))
        continued = WeightOptimizer(resumed, section(name, max_grad_norm=0.5))
        continued.load_state({field: value.clone() for field, value in saved.items()})
        expected = copy.deepcopy(plain)
        reference = WeightOptimizer(expected, section(name, max_grad_norm=0.5))
        reference.load_state(alone.state())
        assert learn(resumed, continued, 2) == learn(expected, reference, 2)
        pairs = zip(resumed.parameters(), expected.parameters(), strict=True)
        assert all(torch.equal(whole(a), b) for a, b in pairs)


def summed_in_float64(model: nn.Module) -> dict[int, torch.Tensor]:
    """Sums, by the place of the parameter, that each pass through the model adds its gradients to."""
    sums: dict[int, torch.Tensor] = {}

    def add(position: int, gradient: torch.Tensor) -> None:
        sums[position] = sums.get(position, 0.0) + gradient.double()

    for position, parameter in enumerate(model.parameters()):
        parameter.register_hook(partial(add, position))
    return sums


def flat(tensors: Iterable[torch.Tensor | None]) -> torch.Tensor:
    return torch.cat([whole(t.detach()).flatten().double() for t in tensors if t is not None])


def test_gradients_of_2048_half_precision_passes_add_up_as_in_float64() -> None:
    # Added up in bfloat16 they are off by almost a half: next to a sum of 256 a gradient below 1 is lost.
    model = small(torch.bfloat16)
    optimizer = WeightOptimizer(model, section("sgd", momentum=0.0, weight_decay=0.0, learning_rate=1.0))
    sums = summed_in_float64(model)
    for target in torch.linspace(-1.0, 3.0, 2048):
        torch.nn.functional.mse_loss(model(torch.arange(5)).float(), target.expand(5, 1)).backward()
    exact = flat(sums[position] for position in sorted(sums))
    assert float((flat(p.grad for p in model.parameters()) - exact).norm() / exact.norm()) < 0.005
    assert optimizer.gradient_norm() == pytest.approx(float(exact.norm()), rel=0.005)
    before = flat(model.parameters())
    optimizer.step(optimizer.gradient_norm())
    # One step of learning rate 1 along a gradient that is scaled to norm 1.
    assert float((before - flat(model.parameters())) @ exact / exact.norm()) == pytest.approx(1.0, rel=0.01)
    assert all(p.grad is None for p in model.parameters())


def test_weights_that_a_pass_left_whole_are_refused(one_rank: DeviceMesh) -> None:
    model = small(torch.float32)
    model.register_parameter("outermost", nn.Parameter(torch.zeros(1)))
    for part in (*model, model):
        fully_shard(part, mesh=one_rank)
    with torch.no_grad():
        model(torch.arange(5))
    with pytest.raises(ValueError, match="parameters must be sharded all or none, got outermost whole"):
        WeightOptimizer(model, section("adamw"))
