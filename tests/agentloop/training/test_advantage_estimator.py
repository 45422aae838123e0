"""Advantages as a run is configured: functions of one's own, batch normalisation, weights, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentloop.algorithms.advantages import RULES, ReplayBaseline
from agentloop.config import RunConfig
from agentloop.config.config_file import load_plain, to_plain
from agentloop.errors import UserError
from agentloop.learning.batch import build_batch
from agentloop.training.advantage_estimator import AdvantageEstimator
from replay.records import BatchRow, Trajectory
from tests.fakes.batch_rows import AUTHORS, batch_row, row, segment
from tests.fakes.environments import reward_functions

FUNCTIONS = Path(reward_functions.__file__)


def estimator(algorithm: str = "grpo", turns: Any = None, **sections: Any) -> AdvantageEstimator:
    config = RunConfig.model_validate({"algorithm": algorithm, **sections})
    return AdvantageEstimator(config, AUTHORS, turns)


def rewarded(name: str, reward: float, *, stream: Any = "fresh", group: str = "g", **more: Any) -> BatchRow:
    made = row(
        name, segment(more.pop("authors", "ull")), advantage=more.pop("advantage", 0.0), stream=stream, group=group
    )
    record = replace(made.trajectory.record, reward=reward, **more)
    return replace(made, trajectory=Trajectory(record, made.trajectory.segments), reward=reward)


def used(made: AdvantageEstimator, rows: list[BatchRow], baseline: ReplayBaseline) -> list[float]:
    return [item.advantage for item in made.of_batch(rows, baseline)[0]]


MIXED = [
    rewarded("a", 1.0),
    rewarded("b", 0.0),
    rewarded("c", 1.0, stream="replay", group="old", advantage=0.25),
    rewarded("d", 0.0, stream="replay", group="old", advantage=-0.75),
]


def test_stored_rows_keep_the_advantage_they_come_with() -> None:
    assert used(estimator(), MIXED, "stored") == [0.0, 0.0, 0.25, -0.75]


def test_reinforce_plus_plus_with_a_baseline_by_hand() -> None:
    rows = [
        rewarded(name, reward, group=group, task=group)
        for name, reward, group in (("a", 1.0, "g"), ("b", 0.0, "g"), ("c", 1.0, "h"), ("d", 1.0, "h"))
    ]
    # Less the means of their groups: 0.5, -0.5, 0, 0; variance (0.25 + 0.25) / 3 = 1/6, of all four.
    found = estimator("reinforce++_baseline").of_groups([v.trajectory for v in rows], [v.reward for v in rows])
    assert found == pytest.approx([1.224745, -1.224745, 0.0, 0.0], abs=1e-6)
    assert found[2:] == [0.0, 0.0]  # exactly: a group of equal rewards tells nothing
    assert estimator("reinforce++_baseline").of_groups([rows[0].trajectory], [1.0]) == [0.0]


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
    found = made.of_groups([v.trajectory for v in rows], [v.reward for v in rows])
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
    assert own.of_groups([v.trajectory for v in MIXED[:2]], [3.0, 7.0]) == [0.0, 1.0]
    assert used(own, MIXED, "shared") == [1.0, 0.0, 0.5, 0.0]
    assert used(own, MIXED, "split") == [1.0, 0.0, 0.5, 0.0]
    assert used(own, MIXED, "stored") == [0.0, 0.0, 0.25, -0.75]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("too_short", r"one finite number per member \(3\), got \[0.0\]"),
        ("not_a_number", "one finite number per member"),
        ("brief", "got AttributeError"),
    ],
)
def test_function_that_gives_no_advantages_is_refused_at_the_start(name: str, told: str) -> None:
    with pytest.raises(UserError, match=rf"advantage.function must .*{told}"):
        estimator(advantage={"function": f"{FUNCTIONS}:{name}"})


def test_batch_normalisation_is_of_each_stream_by_itself() -> None:
    rows = [
        rewarded("a", 0.0, advantage=2.0),
        rewarded("b", 0.0, advantage=-1.0),
        rewarded("c", 0.0, advantage=0.0),
        rewarded("d", 0.0, stream="replay", advantage=8.0),
        rewarded("e", 0.0, stream="replay", advantage=4.0),
    ]
    # Fresh: 2 and -1, sample std 3 / sqrt(2); replayed: 8 and 4, 4 / sqrt(2).
    fresh, replayed = math.sqrt(4.5 + 1e-8), math.sqrt(8 + 1e-8)
    scaled = [2 / fresh, -1 / fresh, 0, 8 / replayed, 4 / replayed]
    assert used(estimator(advantage={"normalise_batch": "scale"}), rows, "stored") == pytest.approx(scaled)
    whitened = [1.5 / fresh, -1.5 / fresh, 0, 2 / replayed, -2 / replayed]
    assert used(estimator(advantage={"normalise_batch": "whiten"}), rows, "stored") == pytest.approx(whitened)


@pytest.mark.parametrize("algorithm", ["reinforce", "remax"])
def test_a_reward_of_zero_is_whitened_where_nobody_is_compared(algorithm: str) -> None:
    rows = [rewarded(name, reward, advantage=reward) for name, reward in (("a", 1.0), ("b", 1.0), ("c", 0.0))]
    # Mean 2/3, variance 1/3.
    found = used(estimator(algorithm, advantage={"normalise_batch": "whiten"}), rows, "stored")
    assert found == pytest.approx([0.577350, 0.577350, -1.154701], abs=1e-6)


def test_a_group_without_a_signal_stays_silent_under_whitening() -> None:
    rows = [rewarded(name, 0.0, advantage=a) for name, a in (("a", 1.0), ("b", -1.0), ("c", 0.0), ("d", 0.0))]
    root = math.sqrt(2 + 1e-8)  # of 1 and -1
    found = used(estimator(advantage={"normalise_batch": "whiten"}), rows, "stored")
    assert found == pytest.approx([1 / root, -1 / root, 0, 0])


def test_what_is_replayed_and_went_badly_has_a_bounded_weight() -> None:
    rows = [replace(v, weight=weight) for v, weight in zip(MIXED, (1, 1, 0.8, 0.8), strict=True)]
    for share in (0.0, 0.25, 0.999, 1.0):
        weights = [r.weight for r in estimator(replay={"negative_weight": share}).of_batch(rows, "stored")[0]]
        assert weights == pytest.approx([1, 1, 0.8, share * 0.8])


def test_turns_that_were_replayed_and_went_badly_have_a_bounded_advantage() -> None:
    """Of a trajectory that went well too; a fresh one's are left alone, and no row is weighed twice."""
    rows = [
        rewarded(name, 0.0, authors="ulel", advantage=advantage, stream=stream)
        for name, advantage, stream in (("a", 0.5, "replay"), ("b", -0.25, "replay"), ("c", 0.5, "fresh"))
    ]
    bounded, _ = estimator(
        "reinforce", lambda _: [(1.0, -2.0)] * 3, advantage={"credit": "turn"}, replay={"negative_weight": 0.25}
    ).of_batch(rows, "stored")
    # Last turn: outcome - 2 = -1.5, -2.25; first: 1 + what follows = -0.5 and -1.25. Replayed ones x 0.25.
    assert build_batch(bounded, AUTHORS).advantages.tolist() == [
        [0, -0.125, 0, -0.375],
        [0, -0.3125, 0, -0.5625],
        [0, -0.5, 0, -1.5],
    ]
    mixed, _ = estimator(
        "reinforce", lambda _: [(3.0, -2.0)] * 3, advantage={"credit": "turn"}, replay={"negative_weight": 0.0}
    ).of_batch(rows, "stored")
    assert build_batch(mixed, AUTHORS).advantages.tolist() == [[0, 1.5, 0, 0], [0, 0.75, 0, 0], [0, 1.5, 0, -1.5]]
    assert [r.weight for r in bounded + mixed] == [1.0] * 6


def test_replayed_rows_with_nobody_to_compare_with_are_counted_and_teach_nothing() -> None:
    alone = rewarded("x", 1.0, stream="replay", group="elsewhere", task="another")
    rows, metrics = estimator().of_batch([*MIXED, alone], "fresh_only")
    assert rows[-1].advantage == 0.0
    assert metrics == {"replay/without_peers": 1.0}


def test_rows_whose_turns_are_unknown_keep_the_advantage_of_the_trajectory_and_are_counted() -> None:
    rows = [rewarded("a", 1.0, authors="ulleel", advantage=0.5), rewarded("b", 0.0, authors="ulel", advantage=-0.5)]
    made = estimator("dr_grpo", lambda _: [(1.0, 0.0), None], advantage={"credit": "turn"})
    rows, metrics = made.of_batch(rows, "stored")
    # a is compared with nobody whose turns are known: its turns add nothing to the outcome
    assert build_batch(rows, AUTHORS).advantages.tolist() == [[0, 0.5, 0.5, 0, 0, 0.5], [0, -0.5, 0, -0.5, 0, 0]]
    assert metrics == {"advantage/unknown_turns": 1.0}


def test_turns_have_their_own_advantages_on_their_own_tokens() -> None:
    rows = [rewarded("a", 1.0, authors="ulleel", advantage=0.5), rewarded("b", 0.0, authors="ulel", advantage=-0.5)]
    earned = {"a": (1.0, 0.0), "b": (0.0, 0.0)}
    made = estimator(
        "dr_grpo",
        lambda trajectories: [earned[t.id] for t in trajectories],
        advantage={"credit": "turn", "turn_gamma": 0.5, "turn_coef": 2.0},
    )
    # mean ((1 + 0) / 2 + 0) / 2 = 0.25; a: z = (0.75, -0.25), last 0.5 - 0.5 = 0, first 1.5 + 0.5 x 0 = 1.5
    # b: z = (-0.25, -0.25), last -0.5 - 0.5 = -1, first -0.5 + 0.5 x -1 = -1
    result = made.of_batch(rows, "stored")[0]
    batch = build_batch(result, AUTHORS)
    assert batch.advantages.tolist() == [[0, 1.5, 1.5, 0, 0, 0.0], [0, -1, 0, -1, 0, 0]]
    assert [r.advantage for r in result] == [0.5, -0.5]


def test_batch_refuses_token_advantages_that_do_not_fit() -> None:
    made = row("a", segment("ull"), segment("ul"))
    fits = (np.float32([9, 1, 2]), np.float32([9, 3]))
    assert build_batch([replace(made, token_advantages=fits)], AUTHORS).advantages.tolist() == [[0, 1, 2], [0, 3, 0]]
    for wrong in (fits[:1], (fits[0], fits[0]), (fits[0], np.float32([0, np.nan]))):
        with pytest.raises(ValueError, match=r"trajectory a: token_advantages must be finite and one per token"):
            build_batch([replace(made, token_advantages=wrong)], AUTHORS)


POOL = {"environment": {"task_pool": 8}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"algorithm": "dr_grpo", "advantage": {"normalise_std": True}}, "advantage.normalise_std must be null or false"),
    (
        {"advantage": {"function": "a.py:f", "normalise_std": False}},
        "advantage.normalise_std must be null when advantage.function is set.*got false",
    ),
    (
        {"algorithm": "reinforce++", "advantage": {"normalise_std": False}},
        r"advantage.normalise_std must be null when algorithm is reinforce\+\+.*algorithm: reinforce\.",
    ),
    (
        {"algorithm": "reinforce++_baseline", "advantage": {"normalise_std": False}},
        r"advantage.normalise_std must be null when algorithm is reinforce\+\+_baseline.*algorithm: dr_grpo\.",
    ),
    (
        {"algorithm": "reinforce++_baseline", "rollout": {"dynamic_sampling_rounds": 1}},
        r"dynamic_sampling_rounds must be 0 when algorithm is reinforce\+\+_baseline, which measures all groups",
    ),
    (
        {"algorithm": "reinforce++_baseline", "advantage": {"credit": "turn"}},
        "advantage.credit must be trajectory when algorithm is reinforce",
    ),
    (
        {
            "advantage": {"credit": "turn"},
            "replay": {"negative_weight": 0.5},
            "loss": {"replay": {"missing_log_probs": "bc"}},
        },
        "replay.negative_weight must be 1 when advantage.credit is turn and loss.replay has bc .*.*0.5",
    ),
    (
        {"algorithm": "opo", "advantage": {"function": "a.py:f"}},
        "algorithm must be left out when advantage.function takes its place",
    ),
    ({"advantage": {"turn_gamma": 0.9}}, "advantage.turn_gamma must be 1 when advantage.credit is trajectory"),
    ({"reward": {"model": {"label": 1}}}, "reward.model.path must be set when reward.model.label is"),
    ({"reward": {"overlong": {"penalty": 2.0}}}, "reward.overlong.buffer must be set when reward.overlong.penalty is"),
    *(
        ({"algorithm": "ppo", **given}, f"{name} must be .* when algorithm is ppo")
        for name, given in (
            ("advantage.function", {"advantage": {"function": "a.py:f"}}),
            ("advantage.normalise_batch", {"advantage": {"normalise_batch": "scale"}}),
            ("advantage.credit", {"advantage": {"credit": "turn"}}),
            ("replay.baseline", {"replay": {"baseline": "split"}}),
            ("replay.negative_weight", {"replay": {"negative_weight": 0.5}}),
            ("rollout.dynamic_sampling_rounds", {"rollout": {"dynamic_sampling_rounds": 1}}),
        )
    ),
    ({"algorithm": "remax", "advantage": {"credit": "turn"}}, "advantage.credit must be trajectory when algorithm"),
    (
        {"advantage": {"credit": "turn", "function": "a.py:f"}},
        "advantage.credit must be trajectory when advantage.function is set",
    ),
    (
        {"advantage": {"credit": "turn"}, "replay": {"fraction": 0.5}},
        "replay.baseline must not be stored when advantage.credit is turn",
    ),
    (
        {"algorithm": "reinforce", "rollout": {"dynamic_sampling_rounds": 1}},
        "rollout.dynamic_sampling_rounds must be 0 when algorithm is reinforce",
    ),
    (
        {"advantage": {"credit": "turn"}, "rollout": {"dynamic_sampling_rounds": 1}},
        "rollout.dynamic_sampling_rounds must be 0 when advantage.credit is turn",
    ),
    (
        {**POOL, "replay": {"unit": "trajectory"}, "rollout": {"dynamic_sampling_rounds": 1}},
        "rollout.dynamic_sampling_rounds must be 0 when replay.unit is trajectory",
    ),
    (
        {**POOL, "algorithm": "reinforce++", "replay": {"complete_zero_variance": True}},
        r"replay.complete_zero_variance must be false when algorithm is reinforce\+\+",
    ),
    (
        {**POOL, "replay": {"complete_zero_variance": True, "fraction": 0.5, "baseline": "split"}},
        "replay.complete_zero_variance must be false when replay.baseline is split",
    ),
    (
        {**POOL, "algorithm": "remax", "replay": {"fraction": 0.5, "baseline": "shared"}},
        "replay.baseline must be stored when algorithm is remax",
    ),
    (
        {**POOL, "advantage": {"function": "a.py:f"}, "replay": {"fraction": 0.5, "baseline": "fresh_only"}},
        "replay.baseline must be stored, shared or split when advantage.function is set",
    ),
    (
        {**POOL, "algorithm": "reinforce", "replay": {"fraction": 0.5, "baseline": "split"}},
        "replay.baseline must be stored when algorithm is reinforce",
    ),
    (
        {"replay": {"fraction": 0.5, "baseline": "shared"}},
        "environment.task_pool must be a number when replay.baseline is shared",
    ),
]


@pytest.mark.parametrize(("given", "told"), REFUSED)
def test_what_nobody_can_give_is_refused_by_name(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        RunConfig.model_validate(given)


def test_what_is_only_observed_needs_no_baseline() -> None:
    RunConfig.model_validate({"replay": {"fraction": 0.5, "mode": "observe"}, "advantage": {"credit": "turn"}})


@pytest.mark.parametrize("algorithm", sorted(RULES))
def test_config_of_an_algorithm_comes_back_from_its_run_folder(algorithm: str) -> None:
    config = RunConfig.model_validate({"algorithm": algorithm})
    assert load_plain(to_plain(config)) == config


def test_row_without_token_advantages_is_the_row_with_equal_ones() -> None:
    made = row("a", segment("ulele"), segment("ull"), advantage=-0.3)
    equal = tuple(np.full(len(part.tokens), -0.3, np.float32) for part in made.trajectory.segments)
    plain, explicit = (build_batch([r], AUTHORS) for r in (made, replace(made, token_advantages=equal)))
    assert plain.advantages.equal(explicit.advantages)
