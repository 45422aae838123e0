"""Advantages as a run is configured: functions of one's own, batch normalisation, weights, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentloop.algorithms.advantages import ReplayBaseline
from agentloop.config import RunConfig
from agentloop.errors import UserError
from agentloop.learning.batch import build_batch
from agentloop.training.advantage_estimator import AdvantageEstimator
from replay.records import BatchRow
from tests.fakes.batch_rows import AUTHORS, batch_row, ragged, row, segment
from tests.fakes.environments import functions
from tests.fakes.tiny_actors import gradients, rescore, run_config, sampled_by, tiny_actor, written_log_probs

FUNCTIONS = Path(functions.__file__)


def estimator(algorithm: str = "grpo", turns: Any = None, **sections: Any) -> AdvantageEstimator:
    config = RunConfig.model_validate({"algorithm": algorithm, **sections})
    return AdvantageEstimator(config, turns)


def rewarded(
    name: str, reward: float, *, authors: str = "ull", advantage: float = 0.0, stream: Any = "fresh", **more: Any
) -> BatchRow:
    made = row(name, segment(authors), advantage=advantage, stream=stream, group=more.pop("group", "g"))
    record = replace(made.trajectory.record, reward=reward, **more)
    return replace(made, trajectory=replace(made.trajectory, record=record), reward=reward)


def used(made: AdvantageEstimator, rows: list[BatchRow], baseline: ReplayBaseline) -> list[float]:
    return [item.advantage for item in made.advantages_for_batch(rows, baseline)[0]]


MIXED = [
    rewarded("a", 1.0),
    rewarded("b", 0.0),
    rewarded("c", 1.0, stream="replay", group="old", advantage=0.25),
    rewarded("d", 0.0, stream="replay", group="old", advantage=-0.75),
]


def reinforce_plus_plus_baseline(rewards: Any, groups: Any) -> Any:
    """arXiv 2501.03262: r - mean of its group, whitened by mean and variance of the whole batch; in float64."""
    centred = rewards - np.array([rewards[groups == group].mean() for group in groups])
    return (centred - centred.mean()) / np.sqrt(centred.var(ddof=1) + 1e-8)


@pytest.mark.parametrize("seed", range(5))
def test_reinforce_plus_plus_with_a_baseline_is_the_whitened_distance_from_the_groups_mean(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(6), rng.integers(2, 6, 6))
    rewards = rng.normal(0.0, 3.0, len(groups)) * (groups != 2)  # one group without a signal
    facts = enumerate(zip(rewards, groups, strict=True))
    rows = [rewarded(f"t{i}", float(r), group=f"g{g}", task=f"k{g}") for i, (r, g) in facts]
    made = estimator("reinforce++_baseline")
    expected = reinforce_plus_plus_baseline(rewards, groups)
    grouped = made.advantages_for_groups([v.trajectory for v in rows], [v.reward for v in rows])
    found = [v.record.advantage for v in grouped]
    assert found == pytest.approx(expected.tolist(), rel=1e-9, abs=1e-12)
    # In a batch each stream by itself (split), or all rows of a task together (shared).
    halves = np.arange(len(groups)) % 2 == 1
    streams = zip(rows, halves, strict=True)
    mixed = [
        batch_row(v.trajectory, "replay", advantage=v.advantage, reward=v.reward) if late else v for v, late in streams
    ]
    assert used(made, mixed, "shared") == pytest.approx(expected.tolist(), rel=1e-9, abs=1e-12)
    for half in (halves, ~halves):
        expected = reinforce_plus_plus_baseline(rewards[half], groups[half])
        assert np.array(used(made, mixed, "split"))[half] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_function_of_ones_own_sees_whole_groups_and_who_is_replayed() -> None:
    own = estimator(advantage={"function": f"{FUNCTIONS}:best_of_group"})
    grouped = own.advantages_for_groups([v.trajectory for v in MIXED[:2]], [3.0, 7.0])
    assert [v.record.advantage for v in grouped] == [0.0, 1.0]
    assert used(own, MIXED, "shared") == [1.0, 0.0, 0.5, 0.0]
    assert used(own, MIXED, "split") == [1.0, 0.0, 0.5, 0.0]
    assert used(own, MIXED, "stored") == [0.0, 0.0, 0.25, -0.75]


@pytest.mark.parametrize("name", ["too_short", "not_a_number", "brief"])
def test_function_that_gives_no_advantages_is_refused_at_the_start(name: str) -> None:
    gives = {"too_short": r"one finite number per member \(3\), got \[0.0\]", "brief": "got AttributeError"}
    with pytest.raises(UserError, match=rf"advantage.function must .*{gives.get(name, 'one finite number per')}"):
        estimator(advantage={"function": f"{FUNCTIONS}:{name}"})


@pytest.mark.parametrize("kind", ["scale", "whiten"])
def test_normalised_batch_has_the_values_and_the_gradient_of_the_written_formula(kind: str) -> None:
    rng, actor = np.random.default_rng(5), tiny_actor()
    for replayed in (0, 1, 3):
        drawn = sampled_by(actor, ragged(fresh=7, replayed=replayed))
        drawn = [replace(item, advantage=float(rng.normal(0.3, 1.0)) * (n != 2)) for n, item in enumerate(drawn)]
        a, late = np.array([item.advantage for item in drawn]), np.arange(7 + replayed) >= 7
        signal = a != 0.0
        m = a[~late & signal].mean() if kind == "whiten" else 0.0
        of_fresh, of_all = (((a[who] - m) ** 2).sum() / (who.sum() - 1) for who in (~late & signal, signal))
        expected = np.where(signal, (a - m) / np.sqrt(np.where(late, of_all, of_fresh) + 1e-8), 0.0)
        rows = estimator(advantage={"normalise_batch": kind}).advantages_for_batch(drawn, "stored")[0]
        assert [item.advantage for item in rows] == pytest.approx(expected.tolist(), rel=1e-12)
        # All ratios are 1, so the gradient is the sum over trained tokens of -A / N times that of a log-prob.
        scored = rescore(actor, rows, old=actor)
        loss = {"replay": {"anchor": "old"}}
        found = gradients(actor, scored, run_config(loss=loss, batch={"micro_batch_tokens": 40}))[1]
        actor.model.zero_grad(set_to_none=True)
        tokens = written_log_probs(actor, scored.batch).items()
        of, n = scored.batch.trajectory.tolist(), int(scored.batch.loss_mask.sum())
        losses = [-np.float32(expected[of[line]]) * log_p / n for (line, _), log_p in tokens]
        torch.autograd.backward(torch.stack(losses).sum())
        by_hand = torch.cat([p.grad.flatten() for p in actor.model.parameters()])
        torch.testing.assert_close(found, by_hand, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("algorithm", ["reinforce", "remax"])
def test_a_reward_of_zero_is_whitened_where_nobody_is_compared(algorithm: str) -> None:
    rows = [rewarded(name, reward, advantage=reward) for name, reward in (("a", 1.0), ("b", 1.0), ("c", 0.0))]
    # Mean 2/3, variance 1/3.
    found = used(estimator(algorithm, advantage={"normalise_batch": "whiten"}), rows, "stored")
    assert found == pytest.approx([0.577350, 0.577350, -1.154701], abs=1e-6)


def test_replayed_rows_with_nobody_to_compare_with_are_counted_and_teach_nothing() -> None:
    alone = rewarded("x", 1.0, stream="replay", group="elsewhere", task="another")
    rows, metrics = estimator().advantages_for_batch([*MIXED, alone], "fresh_only")
    assert rows[-1].advantage == 0.0
    assert metrics == {"replay/without_peers": 1.0}


def test_turns_have_their_own_advantages_on_their_own_tokens() -> None:
    rows = [rewarded("a", 1.0, authors="ulleel", advantage=0.5), rewarded("b", 0.0, authors="ulel", advantage=-0.5)]
    how = {"credit": "turn", "turn_gamma": 0.5, "turn_coef": 2.0}
    result, metrics = estimator("dr_grpo", lambda _: [(1.0, 0.0), (0.0, 0.0)], advantage=how).advantages_for_batch(
        rows, "stored"
    )
    # mean ((1 + 0) / 2 + 0) / 2 = 0.25; a: z = (0.75, -0.25), last 0.5 - 0.5 = 0, first 1.5 + 0.5 x 0 = 1.5
    # b: z = (-0.25, -0.25), last -0.5 - 0.5 = -1, first -0.5 + 0.5 x -1 = -1
    assert build_batch(result, AUTHORS).advantages.tolist() == [[0, 1.5, 1.5, 0, 0, 0.0], [0, -1, 0, -1, 0, 0]]
    assert [r.advantage for r in result] == [0.5, -0.5] and metrics == {"advantage/unknown_turns": 0.0}
    # Where b's are unknown, a is compared with nobody whose turns are known: they add nothing to its outcome.
    result, metrics = estimator(
        "dr_grpo", lambda _: [(1.0, 0.0), None], advantage={"credit": "turn"}
    ).advantages_for_batch(rows, "stored")
    assert build_batch(result, AUTHORS).advantages.tolist() == [[0, 0.5, 0.5, 0, 0, 0.5], [0, -0.5, 0, -0.5, 0, 0]]
    assert metrics == {"advantage/unknown_turns": 1.0}


def test_batch_refuses_token_advantages_that_do_not_fit() -> None:
    made = row("a", segment("ull"), segment("ul"))
    fits = (np.float32([9, 1, 2]), np.float32([9, 3]))
    assert build_batch([replace(made, token_advantages=fits)], AUTHORS).advantages.tolist() == [[0, 1, 2], [0, 3, 0]]
    for wrong in (fits[:1], (fits[0], fits[0]), (fits[0], np.float32([0, np.nan]))):
        with pytest.raises(ValueError, match=r"trajectory a: token_advantages must be finite and one per token"):
            build_batch([replace(made, token_advantages=wrong)], AUTHORS)
