"""Whole runs of each algorithm, and with several environments: what is stored and trained is what the formula says."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentloop.analysis.stored_policies import Asked, evaluate_run
from agentloop.cli.text_tables import evaluation_table
from agentloop.config import RunConfig
from agentloop.training.train import TrainResult, train
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.runs import PARITY, SilentDisplay, StopAfter, layered, rows, small_config

pytestmark = pytest.mark.slow


def quick(folder: Path, model: Path, algorithm: str = "grpo", **sections: dict[str, Any]) -> RunConfig:
    """Two iterations of 4 groups of 4 short episodes."""
    defaults: dict[str, dict[str, Any]] = {
        "run": {"iterations": 2},
        "rollout": {"max_turns": 1},
        "evaluation": {"every": 0, "tasks": 1},
        "checkpoint": {"every": 100, "keep_policies": "none"},
        "replay": {"fraction": 0.0},
    }
    return small_config(folder, model, algorithm, **layered(defaults, sections))


def stored(result: TrainResult) -> dict[tuple[int, str], list[tuple[float, float, int]]]:
    """(reward, advantage, action tokens) of the members of each group."""
    query = """select iteration, group_id, reward, advantage, num_action_tokens from trajectories
               order by iteration, slot"""
    groups = defaultdict(list)
    for iteration, group, *facts in rows(result.folder / "replay.sqlite", query):
        groups[iteration, group].append(tuple(facts))
    return dict(groups)


def test_greedy_episodes_are_what_remax_compares_with(tmp_path: Path, qwen2: Path) -> None:
    display = SilentDisplay()
    groups = stored(train(quick(tmp_path / "remax", qwen2, "remax", run={"iterations": 1}), display=display))
    baselines = [{reward - advantage for reward, advantage, _ in members} for members in groups.values()]
    assert all(found in ({0.0}, {1.0}) for found in baselines)  # a greedy episode earns 0 or 1
    (row,) = display.iterations
    assert row["rollout/greedy_reward"] == sum(map(sum, baselines)) / 4
    assert row["rollout/greedy_failures"] == 0.0
    # Greedy episodes are in no figure of what was collected.
    assert row["rollout/reward"] == np.mean([reward for members in groups.values() for reward, *_ in members])


def test_replayed_rows_are_measured_anew_in_the_batch(tmp_path: Path, qwen2: Path) -> None:
    replay = {"fraction": 0.5, "unit": "trajectory", "baseline": "shared"}
    config, display = quick(tmp_path, qwen2, environment={"task_pool": 4}, replay=replay), SilentDisplay()
    result = train(config, display=display)
    query = """select d.stream, t.task, t.reward, d.advantage, t.advantage from draws d
               join trajectories t on t.id = d.trajectory where d.iteration = 2"""
    found = rows(result.folder / "replay.sqlite", query)
    tasks = defaultdict(list)
    for stream, task, reward, used, _ in found:
        tasks[task].append((stream == "replay", reward, used))
    assert [sum(replayed for replayed, *_ in members) for members in tasks.values()] == [2, 2, 2, 2]
    for members in tasks.values():
        rewards = np.float64([reward for _, reward, _ in members])
        expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        assert [used for *_, used in members] == pytest.approx(expected.tolist(), abs=1e-9)
    assert display.iterations[1]["replay/without_peers"] == 0.0
    # What a row is stored with is what it earned among its own group, whatever it was used with.
    assert any(used != birth for stream, _, _, used, birth in found if stream == "replay")


def test_run_with_turn_credit_learns_where_all_outcomes_are_equal(tmp_path: Path, qwen2: Path) -> None:
    """No episode is answered, so every reward is 0 and every advantage of a whole trajectory too."""
    replay = {"fraction": 0.25, "unit": "trajectory", "baseline": "shared"}
    config = quick(
        tmp_path,
        qwen2,
        environment={"name": PARITY.replace("Parity", "ByTurn"), "task_pool": 4},
        context={"parser": f"{ENVIRONMENTS / 'parity.py'}:Pondering"},
        rollout={"max_turns": 3},  # every whole reply is answered by `think again`
        advantage={"credit": "turn", "turn_gamma": 0.9},
        replay=replay,
    )
    display = SilentDisplay()
    result = train(config, display=display)
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
    database = result.folder / "replay.sqlite"
    # Every round's rows are stored once; only the batch's are trained on.
    used = """select d.iteration, t.group_id, count(*) from draws d join trajectories t on t.id = d.trajectory
              group by 1, 2"""
    flat = {key for key, members in stored(result).items() if members[0][0] == members[1][0]}
    for iteration, row in enumerate([*stopped.iterations, *display.iterations], 1):
        assert row["batch/fresh"] == 16.0 and row["rollout/dynamic_sampling_rounds"] <= 2
        trained = {(of, group): count for of, group, count in rows(database, used) if of == iteration}
        assert list(trained.values()) == [2] * 8
        left = row["rollout/zero_variance_groups_left"]
        assert len(flat & trained.keys()) == left
        assert row["rollout/zero_variance_groups"] - row["rollout/replaced_groups"] == left
    slots = rows(database, "select iteration, slot from trajectories order by iteration, slot")
    assert len(slots) == len(set(slots)) > 32
    # A task that was taken for another one's place has had its turn.
    assert rows(database, "select count(*), count(distinct task) from groups")[0] == (len(slots) // 2,) * 2


THREE: dict[str, Any] = {
    "one": {"share": 0.5, "name": PARITY},
    "two": {"share": 0.3, "name": PARITY, "task_pool": 6},
    "three": {"share": 0.2, "options": {"hops": [1, 1]}},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, qwen2: Path) -> TrainResult:
    """Five iterations, stopped and resumed in between."""
    small = small_config(tmp_path_factory.mktemp("several"), qwen2, run={"iterations": 5})
    config = RunConfig.model_validate(small.model_dump(mode="json") | {"environment": {}, "environments": THREE})
    train(config, display=StopAfter(2))
    return train(config, resume=True, display=SilentDisplay())


def test_shares_are_exact_in_whole_groups_also_after_a_resume(finished: TrainResult) -> None:
    database = finished.folder / "replay.sqlite"
    # 16 fresh episodes, and 12 in each of four iterations more, are 64: 32, 19.2 and 12.8, in whole groups of four.
    query = "select environment, count(*) from trajectories where state != 'orphaned' group by 1"
    assert dict(rows(database, query)) == {"one": 32, "two": 20, "three": 12}
    groups = "select distinct count(distinct environment), count(*) from trajectories group by group_id"
    assert rows(database, groups) == [(1, 4)]


def test_each_environment_has_its_own_figures(finished: TrainResult) -> None:
    query = "select distinct name from metrics where name like 'environment/%' order by 1"
    names = {name for (name,) in rows(finished.folder / "replay.sqlite", query)}
    figures = ("episodes", "reward", "success", "held_out_reward", "held_out_success")
    assert names == {f"environment/{name}/{figure}" for name in THREE for figure in figures}
    page = (finished.folder / "report.html").read_text()
    assert "Held-out success, by environment" in page
    assert "One by one" in page


def test_evaluation_tells_each_environment_apart(finished: TrainResult) -> None:
    report = evaluate_run(finished.folder, Asked(tasks=6))
    assert list(report.environments) == ["one", "two", "three"]
    assert "pass@1 in two" in evaluation_table(report)
    assert report.evaluated.environment == "one, two, three"
