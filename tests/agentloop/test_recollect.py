"""Groups that tell nothing are replaced, in bounded rounds; and nothing that was collected is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from agentloop.config import RunConfig
from agentloop.records import Charge
from agentloop.rollouts.collect import Collected
from agentloop.rollouts.dynamic_sampling import flat_groups, recollect
from agentloop.rollouts.turn_rewards import Valuation
from agentloop.training.mixed_batch import completed_advantages
from replay.records import DrawRecord, GroupRecord, Trajectory
from replay.store import Drawn
from tests.agentloop.training_examples import row, segment


def trajectory(name: str, group: str, reward: float, advantage: float = 0.0) -> Trajectory:
    made = row(name, segment("ul"), group=group, advantage=advantage).trajectory
    return Trajectory(replace(made.record, reward=reward, task=f"task of {group}"), made.segments)


def collected(**rewards: Sequence[float]) -> Collected:
    """Groups by name, each with its members' rewards; what differs has an advantage."""
    groups = [
        GroupRecord(name, "run", f"task of {name}", 1, len(given), 0.0, 0.0, 0.0) for name, given in rewards.items()
    ]
    rows = [
        trajectory(f"{name}{i}", name, reward, reward - sum(given) / len(given))
        for name, given in rewards.items()
        for i, reward in enumerate(given)
    ]
    return Collected(
        groups=groups,
        trajectories=rows,
        rewrites=Counter({"clip": 1}),
        worth={t.id: t.record.reward for t in rows},
        charges={t.id: Charge(tokens=1) for t in rows},
        told={"reward/brief": float(len(rows)), "rollout/reward_failures": 1.0},
    )


class Rounds:
    """Gives what a test has written down, and notes what was asked."""

    def __init__(self, *later: Collected) -> None:
        self._later = list(later)
        self.asked: list[list[int]] = []

    def __call__(self, sizes: Sequence[int], before: Sequence[Collected]) -> Collected:
        assert len(before) == len(self.asked) + 1
        self.asked.append(list(sizes))
        return replace(self._later.pop(0), further_tasks=(len(self.asked),))


def names(groups: Sequence[GroupRecord]) -> list[str]:
    return [group.id for group in groups]


def test_a_kl_penalty_hides_no_flat_group() -> None:
    found = collected(a=(1, 1), b=(0, 1))
    # The penalty tells the members of a apart, as it would those of any group.
    penalties = dict(zip(("a0", "a1", "b0", "b1"), (0.01, 0.02, 0.03, 0.01), strict=True))
    rows = [replace(t, record=replace(t.record, advantage=0.5 - penalties[t.id])) for t in found.trajectories]
    charges = {id: Charge(penalty, kl=1.0, tokens=1) for id, penalty in penalties.items()}
    assert [group.id for group, _ in flat_groups(replace(found, trajectories=rows, charges=charges))] == ["a"]


def test_silent_groups_are_replaced_in_their_places_until_none_is_left() -> None:
    first = collected(a=(0, 0), b=(0, 1), c=(1, 1, 1), d=(1, 0))
    more = Rounds(collected(e=(0, 0), f=(1, 0)), collected(g=(0, 1, 1)))
    result = recollect(first, more, rounds=5)
    assert more.asked == [[2, 3], [3]]
    assert names(result.groups) == ["f", "b", "g", "d"]
    assert [t.record.group for t in result.trajectories] == ["f", "f", "b", "b", "g", "g", "g", "d", "d"]
    assert names(result.spare_groups) == ["a", "c", "e"]
    assert [t.record.group for t in result.spare] == ["a", "a", "c", "c", "c", "e", "e"]
    assert result.further_tasks == (1, 2)
    assert len(result.worth) == len(result.charges) == 16
    assert result.rewrites == {"clip": 3}
    assert result.told == {
        "reward/brief": (9 * 9 + 4 * 4 + 3 * 3) / 16,
        "rollout/reward_failures": 3.0,
        "rollout/recollect_rounds": 2.0,
        "rollout/flat_groups": 2.0,
        "rollout/replaced_groups": 2.0,
        "rollout/flat_groups_left": 0.0,
    }


def test_what_is_left_after_the_last_round_stays_in_the_batch() -> None:
    more = Rounds(collected(c=(0, 0)))
    result = recollect(collected(a=(0, 0), b=(0, 1)), more, rounds=1)
    assert names(result.groups) == ["a", "b"]
    assert names(result.spare_groups) == ["c"]
    assert result.told["rollout/flat_groups_left"] == 1.0


def test_groups_that_tell_something_and_groups_of_one_cost_no_round() -> None:
    more = Rounds()
    result = recollect(collected(a=(0.5,), b=(0, 1)), more, rounds=3)
    assert more.asked == []
    assert names(result.groups) == ["a", "b"]
    assert result.told["rollout/flat_groups"] == 0.0


def test_a_round_in_which_everything_failed_changes_nothing() -> None:
    result = recollect(collected(a=(0, 0), b=(0, 1)), Rounds(Collected(), collected(c=(1, 0))), rounds=2)
    assert names(result.groups) == ["c", "b"]


def test_equal_rewards_with_advantages_are_not_silent() -> None:
    """As with a KL penalty that differs."""
    penalised = collected(a=(1, 1))
    rows = [replace(t, record=replace(t.record, advantage=0.1)) for t in penalised.trajectories]
    assert flat_groups(replace(penalised, trajectories=rows)) == []
    assert names([group for group, _ in flat_groups(penalised)]) == ["a"]


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    # The group of 0, 0 is completed by one 1 of its task: mean 1/3; of the others 0 + 1 over 2; weighed by length
    # alike, as all have one action token.
    [("dr_grpo", -1 / 3), ("rloo", -1 / 2), ("opo", -1 / 3)],
)
def test_completed_groups_are_measured_by_the_runs_own_algorithm(algorithm: str, expected: float) -> None:
    fresh = collected(a=(0, 0), b=(0, 1))
    drawn = [
        Drawn(DrawRecord("run", 2, 4 + i, t.id, "replay", None, None), t)
        for i, t in enumerate((trajectory("x", "a", 1.0), trajectory("y", "a", 0.0), trajectory("z", "b", 5.0)))
    ]
    valuation = Valuation.of(RunConfig.model_validate({"algorithm": algorithm}))
    assert completed_advantages(fresh, drawn, valuation) == pytest.approx({"a0": expected, "a1": expected}, abs=1e-15)


def test_function_of_ones_own_sees_who_completes_a_group_and_what_each_is_worth(tmp_path: Path) -> None:
    """Fields as in any batch; the stored row is charged 0.25, the fresh ones 0.125 each."""
    file = tmp_path / "own.py"
    file.write_text(
        "def told(members):\n"
        "    names = [(m.group, m.task, m.replayed) for m in members]\n"
        "    fresh = ('a', 'task of a', False)\n"
        "    if members[0].task != 'task' and names != [fresh, fresh, ('old', 'task of a', True)]:\n"
        "        raise ValueError(names)\n"
        "    return [m.reward - members[-1].reward for m in members]\n"
    )
    valuation = Valuation.of(RunConfig.model_validate({"advantage": {"function": f"{file}:told"}}))
    fresh = replace(collected(a=(0, 0)), worth={"a0": -0.125, "a1": -0.125})
    stored = trajectory("x", "old", 1.0)
    stored = replace(stored, record=replace(stored.record, task="task of a"))
    drawn = [Drawn(DrawRecord("run", 2, 4, "x", "replay", None, None), stored)]
    charging = replace(valuation, penalty=lambda rows: [Charge(0.25, 1.0, 1) for _ in rows])
    # -0.125 - (1 - 0.25)
    assert completed_advantages(fresh, drawn, charging) == {"a0": -0.875, "a1": -0.875}
