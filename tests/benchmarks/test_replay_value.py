"""What the evidence says is what its runs gave, and what a figure of it means."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from agentloop.config.config_file import load_config
from benchmarks._replay_arms import ARMS, BUDGET, CONTENDERS, SEEDS, SETTINGS, STARTS, TASKS, TUNING_SEEDS, Job
from benchmarks._replay_figures import interval, less, mean_success, points_less, to_recent, to_target
from benchmarks._replay_jobs import jobs, score, tuned
from benchmarks._replay_report import plots, starts_table, tables, with_tables
from benchmarks._replay_runs import add_result, configuration, read_results
from benchmarks.replay_value import PAGE, PLOTS, RESULTS, by_key, run

SPOKEN = re.compile(r"\S+ \[[-+\d.,]+, (?:[-+\d.,]+|never)\]")


def result(evaluations: list[list[float]], *, fresh: int = 128, success: float = 0.5, iterations: int = 6) -> Any:
    """Iterations of 2 tool calls run per fresh episode, 2 CPU-seconds and 3 seconds each."""
    row = [fresh, 0, success, 2 * fresh, 2.0, 3.0]
    return {"iterations": [row] * iterations, "evaluations": evaluations}


def reaching(iterations: int, *, seed: int = 0) -> Any:
    """A run that was at the target after so many iterations of 128 fresh episodes; 0: never."""
    reached = [[iterations, 0.9], [iterations + 1, 0.9]]
    return {**result(reached if iterations else [[6, 0.5]], iterations=max(6, iterations + 1)), "seed": seed}


@pytest.fixture(scope="module")
def results() -> list[Any]:
    return read_results(RESULTS)


def test_tables_of_the_page_are_those_of_the_results(results: list[Any]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.count("<!-- table: ") > 0
    assert with_tables(page, tables(results)) == page


def test_intervals_that_the_page_speaks_of_are_in_its_tables() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = " | ".join(line for line in lines if line.startswith("|"))
    spoken = SPOKEN.findall(" ".join(line for line in lines if not line.startswith("|")))
    assert [each for each in spoken if f"| {each} |" not in cells] == []


def test_plots_are_those_of_the_results(results: list[Any]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    drawn = plots(results)
    assert {path.name for path in PLOTS.glob("*.svg")} == set(drawn)
    assert {name: (PLOTS / name).read_text(encoding="utf-8") for name in drawn} == drawn
    assert all(f"(evidence/{name})" in page for name in drawn)


def test_every_result_is_there_once_with_the_setting_that_was_found(results: list[Any]) -> None:
    found = by_key(results)
    assert len(found) == len(results)
    for task, arm, setting, seed in found:
        if seed in TUNING_SEEDS:
            assert arm in CONTENDERS and setting in SETTINGS
        else:
            assert seed in SEEDS
            assert setting == tuned(TASKS[task].tuned_as or task, ARMS[arm].contender, found)


@pytest.mark.parametrize("arm", ARMS)
def test_arm_is_a_configuration(arm: str) -> None:
    values = {**TASKS["sparse"].values, **Job("sparse", arm, "32x4@0.0015", 0).values}
    config = configuration(values, seed=0, folder=Path("runs"))
    assert config.environment.options["hops"] == [3, 6]
    assert config.batch.ppo_epochs == 4
    assert round(config.batch.trajectories * (1 - config.replay.fraction)) == 32
    assert (config.replay.fraction > 0) == (ARMS[arm].contender != "on_policy")


def test_configuration_of_hindsight_is_the_setting_that_was_found(results: list[Any]) -> None:
    setting = tuned("sparse", "hindsight", by_key(results))
    assert setting is not None
    job = Job("sparse", "hindsight", setting, 0)
    found = configuration({"run.iterations": 81, **TASKS["sparse"].values, **job.values}, seed=0, folder=Path("runs"))
    shipped = load_config(Path("configs/hindsight.yaml"))
    for part in ("environment", "warm_up", "batch", "replay", "optimizer", "loss"):
        assert getattr(shipped, part) == getattr(found, part), part
    assert shipped.run.schedule_length == found.run.schedule_length


def test_arms_follow_when_their_contender_is_tuned() -> None:
    found: dict[Any, Any] = {}
    sizes = []
    while (ready := jobs(["dense"], ["on_policy", "turn_credit"], [0], found)) and ready[0].seed in TUNING_SEEDS:
        sizes.append(len(ready))
        for job in ready:
            found[job.key] = reaching(2 if job.setting == "64x2@0.0007" else 3, seed=job.seed)
    assert sizes == [12, 4, 2]
    assert [job.key for job in ready] == [
        ("dense", "on_policy", "64x2@0.0007", 0),
        ("dense", "turn_credit", "64x2@0.0007", 0),
    ]
    slow = jobs(["dense_50ms"], ["on_policy", "on_policy_rerun"], [0], found)
    assert [job.setting for job in slow] == ["64x2@0.0007"] * 2


def test_tuning_counts_what_was_missing_where_the_target_was_not_reached() -> None:
    assert score(reaching(2)) == 2 * 128
    assert score(reaching(0)) == 2 * BUDGET - 6 * 128 * 0.5


def test_runs_that_are_there_are_not_made_again(tmp_path: Path) -> None:
    there = []
    for seed, kept in zip(TUNING_SEEDS, (12, 4, 2), strict=True):
        there += [{**vars(Job("dense", "on_policy", name, seed)), **reaching(1)} for name in [*SETTINGS][:kept]]
    best = next(iter(SETTINGS))
    there = [{**each, "seed": job} for each, job in zip(there, [100] * 12 + [101] * 4 + [102] * 2, strict=True)]
    there.append({**reaching(1), **vars(Job("dense", "on_policy", best, 3))})
    for each in there:
        add_result(tmp_path / "results.jsonl", each)
    run(["dense"], ["on_policy"], [3], results=tmp_path / "results.jsonl", work=tmp_path / "work")
    assert read_results(tmp_path / "results.jsonl") == there


def test_target_is_reached_at_the_first_of_two_evaluations_in_a_row() -> None:
    found = result([[2, 0.91], [3, 0.89], [4, 0.90], [5, 0.95]])
    assert to_target(found, "fresh") == 4 * 128
    assert to_target(found, "runs") == 4 * 256
    assert to_target(result([[2, 0.91], [4, 0.89]]), "fresh") == math.inf


def test_recent_success_is_that_of_whole_iterations_with_256_fresh_episodes() -> None:
    found = result([[6, 0.95]], fresh=96)
    found["iterations"] = [[96, 32, share, 0, 0, 1.0, 1.0] for share in (0.9, 0.9, 0.3, 0.8, 0.9, 0.9)]
    # Three iterations hold 288: (0.9 + 0.9 + 0.3) / 3 = 0.7, 0.67, 0.67, (0.8 + 0.9 + 0.9) / 3 = 0.87.
    assert to_recent(found, "fresh") == 6 * 96


def test_mean_success_goes_on_with_what_the_last_evaluations_gave() -> None:
    # 6 x 128 = 768 episodes at 0.5, 256 more at (0.9 + 0.96) / 2 = 0.93
    assert mean_success(result([[5, 0.9], [6, 0.96]]), 1024) == pytest.approx((768 * 0.5 + 256 * 0.93) / 1024)


def test_start_models_are_not_measured_on_easier_tasks() -> None:
    own = {**result([], success=0.25), "task": "sparse", "arm": "on_policy", "start": "a", "seed": 0}
    easier = {**own, **result([], success=0.75), "arm": "short_first"}
    assert "25.0 % |" in starts_table([own, easier])


def test_run_that_never_got_there_counts_as_longer_than_any_other() -> None:
    assert interval(dict(enumerate([1.0, math.inf, 2.0, math.inf, 3.0]))).median == 3.0
    assert interval(dict(enumerate([1.0, math.inf, math.inf]))).median == math.inf
    assert interval({0: 1.0, 1: 1.0, 2: math.inf}).high == math.inf


def test_interval_draws_start_models_with_all_their_seeds() -> None:
    """Of two models, each is drawn twice with probability 1/4, both with 1/2."""
    two = interval({0: 1.0, STARTS: 2.0, 1: 11.0, STARTS + 1: 12.0})
    assert (two.low, two.median, two.high) == (1.5, 6.5, 11.5)
    # Seeds of one model are no evidence of what others do.
    assert interval({0: 1.0, STARTS: 9.0}) == interval({0: 5.0})
    # Of three, all three times 1/27 each: beyond 2.5 % on either side.
    assert interval({0: 1.0, 1: 2.0, 2: 3.0}).low == 1.0


def test_differences_are_taken_seed_by_seed_and_never_flatter_the_arm() -> None:
    control = [reaching(4, seed=0), reaching(5, seed=1), reaching(0, seed=2), reaching(0, seed=3), reaching(4, seed=5)]
    arm = [reaching(3, seed=0), reaching(0, seed=1), reaching(3, seed=2), reaching(0, seed=3), reaching(3, seed=4)]
    # -25 %; never; half of the 6 iterations that the control had made in vain; no difference
    assert less(arm, control, "fresh") == {0: -25.0, 1: math.inf, 2: -50.0, 3: 0.0}
    # Neither got there: what both spent on as many fresh episodes.
    thrifty = {**reaching(0), "iterations": [[128, 0, 0.5, 64, 1.0, 3.0]] * 6}
    found = {name: less([thrifty], [reaching(0)], name)[0] for name in ("fresh", "runs", "cpu", "wall")}
    assert found == {"fresh": 0.0, "runs": -75.0, "cpu": -50.0, "wall": 0.0}
    assert points_less([result([[6, 1.0]]) | {"seed": 0}], [reaching(0)], 1536) == {0: pytest.approx(25.0)}
