"""How many optimizer steps a batch takes."""

from typing import Any

import pytest

from tests.fakes.batch_rows import ragged
from tests.fakes.tiny_actors import run_config, tiny_actor, trainer


@pytest.mark.parametrize("algorithm", ["reinforce", "ppo"])
@pytest.mark.parametrize(
    ("rows", "mini_batch", "epochs", "expected"),
    [
        (9, 9, 1, 1),  # 1 x ceil(9 / 9)
        (9, 4, 1, 3),  # 1 x ceil(9 / 4)
        (9, 4, 2, 6),  # 2 x 3
        (9, 9, 3, 3),  # 3 x 1
        (9, 1000, 1, 1),
        (8, 4, 4, 8),  # 4 x ceil(8 / 4)
    ],
)
def test_steps_are_epochs_times_batches(rows: int, mini_batch: int, epochs: int, expected: int, algorithm: Any) -> None:
    """ppo_epochs x ceil(batch / mini_batch), of the policy and of a critic, counted by their own optimizers."""
    config = run_config(algorithm=algorithm, batch={"mini_batch": mini_batch, "ppo_epochs": epochs})
    learner = trainer(tiny_actor(), config)
    fresh = rows if algorithm == "ppo" else 6  # a critic makes no step without fresh rows
    result = learner.update(ragged(fresh=fresh, replayed=rows - fresh), iteration=1)
    assert result.optimizer_steps == expected
    state = learner.state()
    for of_critic in {False, algorithm == "ppo"}:
        steps = {int(v) for k, v in state.items() if k.endswith("/adamw.step") and k.startswith("critic.") == of_critic}
        assert steps == {expected}
