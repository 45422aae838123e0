"""Whole runs of each algorithm: what is stored and what is trained is what the formula says."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentloop.config import RunConfig
from agentloop.training.from_python.train_result import TrainResult
from agentloop.training.train import train
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.runs import PARITY, SilentDisplay, StopAfter, rows, small_config

pytestmark = pytest.mark.slow


def quick(folder: Path, model: Path, algorithm: str = "grpo", **sections: dict[str, Any]) -> RunConfig:
    """Two iterations of 4 groups of 4 short episodes."""
    defaults: dict[str, dict[str, Any]] = {
        "run": {"iterations": 2},
        "rollout": {"max_turns": 1, "max_tokens_per_turn": 12},
        "evaluation": {"every": 0, "tasks": 1},
        "checkpoint": {"every": 100, "keep_policies": "none"},
        "replay": {"fraction": 0.0},
    }
    merged = {name: {**defaults.get(name, {}), **sections.get(name, {})} for name in {*defaults, *sections}}
    return small_config(folder, model, algorithm, **merged)


def stored(result: TrainResult) -> dict[tuple[int, str], list[tuple[float, float, int]]]:
    """(reward, advantage, action tokens) of the members of each group."""
    query = """select iteration, group_id, reward, advantage, num_action_tokens from trajectories
               order by iteration, slot"""
    groups = defaultdict(list)
    for iteration, group, *facts in rows(result.folder / "replay.sqlite", query):
        groups[iteration, group].append(tuple(facts))
    return dict(groups)


@pytest.mark.parametrize(
    "algorithm", ["rloo", "reinforce", "reinforce++", "reinforce++_baseline", "dr_grpo", "opo", "remax"]
)
def test_run_stores_the_advantages_of_its_algorithm(tmp_path: Path, qwen2: Path, algorithm: str) -> None:
    display = SilentDisplay()
    result = train(quick(tmp_path, qwen2, algorithm, run={"iterations": 1}), display=display)
    groups = stored(result)
    assert len(groups) == 4
    batch = np.float64([reward for members in groups.values() for reward, *_ in members])
    centred = batch.reshape(4, 4) - batch.reshape(4, 4).mean(axis=1, keepdims=True)
    for members in groups.values():
        reward, advantage, length = np.float64(members).T
        expected = {
            "rloo": (reward - reward.mean()) * 4 / 3,
            "reinforce": reward,
            "reinforce++": (reward - batch.mean()) / (batch.std(ddof=1) + 1e-6),
            "reinforce++_baseline": (reward - reward.mean()) / np.sqrt(centred.var(ddof=1) + 1e-8),
            "dr_grpo": reward - reward.mean(),
            "opo": reward - (length * reward).sum() / length.sum(),
            "remax": None,
        }[algorithm]
        if expected is not None:
            assert advantage == pytest.approx(expected, abs=1e-12)
        else:  # a greedy episode earns 0 or 1
            assert set((reward - advantage).tolist()) in ({0.0}, {1.0})
    assert all(math.isfinite(row["actor/fresh/pg_loss"]) for row in display.iterations)
    if algorithm == "remax":
        baselines = [reward - advantage for members in groups.values() for reward, advantage, _ in members[:1]]
        row = display.iterations[0]
        assert row["rollout/greedy_reward"] == sum(baselines) / 4
        assert row["rollout/greedy_failures"] == 0.0
        # Greedy episodes are in no figure of what was collected.
        assert row["rollout/reward"] == batch.mean()


@pytest.mark.parametrize("baseline", ["shared", "split", "fresh_only", "leave_one_out"])
def test_replayed_rows_are_measured_anew_in_the_batch(tmp_path: Path, qwen2: Path, baseline: str) -> None:
    config = quick(
        tmp_path,
        qwen2,
        environment={"task_pool": 4},
        replay={"fraction": 0.5, "unit": "trajectory", "baseline": baseline, "negative_weight": 0.5},
    )
    display = SilentDisplay()
    result = train(config, display=display)
    query = """select d.stream, t.task, t.reward, d.advantage, t.advantage from draws d
               join trajectories t on t.id = d.trajectory where d.iteration = 2"""
    found = rows(result.folder / "replay.sqlite", query)
    tasks = defaultdict(list)
    for stream, task, reward, used, _ in found:
        tasks[task].append((stream == "replay", reward, used))
    assert [sum(replayed for replayed, *_ in members) for members in tasks.values()] == [2, 2, 2, 2]
    for members in tasks.values():
        for position, (replayed, reward, used) in enumerate(members):
            compared = [
                p
                for p, (is_old, *_) in enumerate(members)
                if {
                    "shared": True,
                    "leave_one_out": p != position,
                    "split": is_old == replayed,
                    "fresh_only": not is_old,
                }[baseline]
            ]
            others = np.float64([members[p][1] for p in compared])
            scale = np.float64([members[p][1] for p in {*compared, position}]).std(ddof=1) + 1e-6
            assert used == pytest.approx((reward - others.mean()) / scale, abs=1e-9)
    assert display.iterations[1]["replay/without_peers"] == 0.0
    # What a row is stored with is what it earned among its own group, whatever it was used with.
    assert any(used != birth for stream, _, _, used, birth in found if stream == "replay")


def turned(folder: Path, model: Path, **sections: dict[str, Any]) -> RunConfig:
    """Three turns at most, as every whole reply is answered by `think again`."""
    return quick(
        folder,
        model,
        environment={"name": PARITY.replace("Parity", "ByTurn"), "task_pool": 4},
        context={"parser": f"{ENVIRONMENTS / 'parity.py'}:Pondering"},
        rollout={"max_turns": 3},
        advantage={"credit": "turn", "turn_gamma": 0.9},
        **sections,
    )


def test_run_with_turn_credit_learns_where_all_outcomes_are_equal(tmp_path: Path, qwen2: Path) -> None:
    """No episode is answered, so every reward is 0 and every advantage of a whole trajectory too."""
    replay = {"fraction": 0.25, "unit": "trajectory", "baseline": "shared"}
    display = SilentDisplay()
    result = train(turned(tmp_path, qwen2, replay=replay), display=display)
    database = result.folder / "replay.sqlite"
    assert rows(database, "select distinct reward, advantage from trajectories") == [(0.0, 0.0)]
    assert rows(database, "select max(num_turns) from trajectories") == [(3,)]
    assert [row["advantage/unknown_turns"] for row in display.iterations] == [0.0, 0.0]
    assert all(row["actor/grad_norm"] > 0 for row in display.iterations)
    assert display.iterations[1]["actor/replay/pg_loss"] != 0.0


def test_groups_of_equal_rewards_are_collected_anew(tmp_path: Path, qwen2: Path) -> None:
    rounds = {"rollout": {"dynamic_sampling_rounds": 2}, "checkpoint": {"every": 1}}
    config = quick(tmp_path, qwen2, batch={"group_size": 2, "mini_batch": 16}, **rounds)
    stopped, display = StopAfter(1), SilentDisplay()
    train(config, display=stopped)
    result = train(config, resume=True, display=display)  # tasks that were taken beyond the planned ones are remembered
    display.iterations = stopped.iterations + display.iterations
    database = result.folder / "replay.sqlite"
    assert [row["batch/fresh"] for row in display.iterations] == [16.0, 16.0]
    assert max(row["rollout/dynamic_sampling_rounds"] for row in display.iterations) <= 2
    # Every round's rows are stored once; only the batch's are trained on.
    for iteration, row in enumerate(display.iterations, 1):
        groups = {group: members for (of, group), members in stored(result).items() if of == iteration}
        flat = {group for group, members in groups.items() if members[0][0] == members[1][0]}
        used = rows(
            database,
            f"""select t.group_id, count(*) from draws d join trajectories t on t.id = d.trajectory
                where d.iteration = {iteration} group by 1""",
        )
        assert {count for _, count in used} == {2}
        assert len(used) == 8
        assert len(flat & {group for group, _ in used}) == row["rollout/zero_variance_groups_left"]
        assert (
            row["rollout/zero_variance_groups"] - row["rollout/replaced_groups"]
            == row["rollout/zero_variance_groups_left"]
        )
    slots = rows(database, "select iteration, slot from trajectories order by iteration, slot")
    assert len(slots) == len(set(slots)) > 32
    # A task that was taken for another one's place has had its turn.
    assert rows(database, "select count(*), count(distinct task) from groups")[0] == (len(slots) // 2,) * 2


def test_rewards_of_ones_own_are_stored_and_success_stays_the_environments(tmp_path: Path, qwen2: Path) -> None:
    function = f"{ENVIRONMENTS / 'reward_functions.py'}:length_or_nothing"
    reward = {"environment": 0.5, "functions": [{"function": function, "weight": 4.0}], "on_error": "drop"}
    display = SilentDisplay()
    config = quick(tmp_path, qwen2, reward=reward, replay={"fraction": 0.25}, rollout={"max_tokens_per_turn": 24})
    database = train(config, display=display).folder / "replay.sqlite"
    found = rows(database, "select reward, success, num_tokens, stop_reason from trajectories")
    for total, success, length, stop_reason in found:
        assert total == 0.5 * success + length
        assert length % 3 > 0
        assert stop_reason == "answered" or not success
    lost = [row["rollout/reward_failures"] for row in display.iterations]
    assert sum(lost) > 0
    fresh = [row["batch/fresh"] + row["batch/fresh_shortfall"] for row in display.iterations]
    assert fresh == [16.0, 12.0]
    assert len(found) + sum(lost) == sum(fresh)


def test_run_with_other_objectives_and_a_correction_tells_what_they_did(tmp_path: Path, qwen2: Path) -> None:
    correction = {"kind": "truncate", "level": "turn", "mean": "geometric", "ratio_high": 1.5}
    loss: dict[str, Any] = {
        "fresh": {"objective": "gspo"},
        "replay": {"objective": "gmpo", "anchor": "old", "correction": correction, "missing_log_probs": "luffy"},
    }
    config = quick(tmp_path, qwen2, loss=loss, batch={"ppo_epochs": 2}, replay={"fraction": 0.25})
    found = train(config, display=SilentDisplay()).folder / "replay.sqlite"
    names = {name for (name,) in rows(found, "select name from metrics where iteration = 2")}
    assert {"actor/fresh/pg_loss", "actor/replay/pg_loss", "actor/replay/importance_weight_mean"} <= names
    assert "actor/fresh/importance_weight_mean" not in names
    ((weight,),) = rows(
        found, "select value from metrics where iteration = 2 and name = 'actor/replay/importance_weight_mean'"
    )
    assert 0 < weight <= 1.5
