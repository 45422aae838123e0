"""What a whole batch makes of its tokens: denominators, baselines, metrics per stream, and the number of updates."""

from typing import Any

import pytest

from tests.fakes.batch_rows import ragged, row, run_config, sampled_by, segment, stored_off_by, tiny_actor, trainer


def test_clip_fraction_of_a_stream_is_that_of_its_own_tokens() -> None:
    """Half the tokens replayed at ratio e^2 = 7.4, the fresh ones at 1: 1 and 0, where one mask for both says 0.5."""
    actor = tiny_actor()
    rows = [row("fresh", segment("uulll")), row("old", segment("uulll", seed=1), stream="replay")]
    fresh, old = sampled_by(actor, rows)
    metrics = trainer(actor, run_config()).update([fresh, stored_off_by(old, -2.0)], iteration=1).metrics
    assert metrics["actor/fresh/pg_clipfrac"] == 0.0
    assert metrics["actor/replay/pg_clipfrac"] == 1.0
    assert metrics["actor/fresh/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["actor/replay/ratio_mean"] == pytest.approx(7.389, rel=1e-4)
    # A = 1 in both streams: -r unclipped, and -(1 + clip_high) clipped.
    assert metrics["actor/fresh/pg_loss"] == pytest.approx(-1.0, abs=1e-6)
    assert metrics["actor/replay/pg_loss"] == pytest.approx(-1.2, abs=1e-6)


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
