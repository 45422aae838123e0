"""What the evidence says is what its runs gave, and what a figure of it means."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks._replay_arms import ARMS, COMMON, SEEDS, TASKS
from benchmarks._replay_figures import beside, courses, interval, mean_success, to_recent, to_target
from benchmarks._replay_report import plots, tables, with_tables
from benchmarks._replay_runs import add_result, configuration, read_results
from benchmarks.replay_value import PAGE, PLOTS, RESULTS, run


def result(evaluations: list[list[float]], *, fresh: int = 128, success: float = 0.5, iterations: int = 6) -> Any:
    """Iterations of 4 tool calls per fresh episode, 2 CPU-seconds and 3 seconds each."""
    row = [fresh, 0, success, 4 * fresh, 2.0, 3.0]
    return {"iterations": [row] * iterations, "evaluations": evaluations}


@pytest.fixture(scope="module")
def results() -> list[Any]:
    return read_results(RESULTS)


def test_tables_of_the_page_are_those_of_the_results(results: list[Any]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.count("<!-- table: ") == len(tables(results)) > 0
    assert with_tables(page, tables(results)) == page


def test_intervals_that_the_page_speaks_of_are_in_its_tables() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = " | ".join(line for line in lines if line.startswith("|"))
    prose = " ".join(line for line in lines if not line.startswith("|"))
    spoken = re.findall(r"\S+ \[[-+\d.,]+, [-+\d.,]+\]", prose)
    assert len(spoken) >= 6
    assert [each for each in spoken if f"| {each} |" not in cells] == []


def test_plots_are_those_of_the_results(results: list[Any]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    drawn = plots(results)
    assert {path.name for path in PLOTS.glob("*.svg")} == set(drawn)
    assert {name: (PLOTS / name).read_text(encoding="utf-8") for name in drawn} == drawn
    assert all(f"(evidence/{name})" in page for name in drawn)


def test_controller_that_has_nothing_to_do_leaves_a_run_as_it_is(results: list[Any]) -> None:
    runs = {(each["arm"], each["seed"]): courses(each) for each in results if each["task"] == "dense"}
    controlled = [seed for arm, seed in runs if arm == "replay_50_success_ess"]
    assert controlled
    assert all(runs["replay_50_success_ess", seed] == runs["replay_50_success", seed] for seed in controlled)


def test_every_result_is_of_an_arm_with_these_settings_and_there_once(results: list[Any]) -> None:
    assert all(each["settings"] == dict(ARMS[each["arm"]].settings) for each in results)
    runs = [(each["task"], each["arm"], each["seed"]) for each in results]
    assert len(set(runs)) == len(runs)
    assert {seed for _, _, seed in runs} <= {*SEEDS}


@pytest.mark.parametrize("arm", ARMS)
def test_arm_is_a_configuration(arm: str) -> None:
    config = configuration({**COMMON, **TASKS["sparse"].settings, **ARMS[arm].settings}, seed=0, folder=Path("runs"))
    assert config.environment.options["hops"] == [3, 6]
    assert (config.replay.fraction > 0) == arm.startswith("replay")


def test_runs_that_are_there_are_not_made_again(tmp_path: Path) -> None:
    there = {"task": "dense", "arm": "half_batch", "seed": 3}
    add_result(tmp_path / "results.jsonl", there)
    run(["dense"], ["half_batch"], [3], results=tmp_path / "results.jsonl", work=tmp_path / "work", budget=None)
    assert read_results(tmp_path / "results.jsonl") == [there]


def test_target_is_reached_at_the_first_of_two_evaluations_in_a_row() -> None:
    found = result([[2, 0.91], [3, 0.89], [4, 0.90], [5, 0.95]])
    assert to_target(found, "fresh") == 4 * 128
    assert to_target(found, "fresh", in_a_row=1) == 2 * 128
    # 4 iterations of 2 CPU-seconds, and 4 x 512 calls of 0.05 s
    assert to_target(found, "waited") == pytest.approx(8 + 102.4)
    assert to_target(result([[2, 0.91], [4, 0.89]]), "fresh") == math.inf


def test_recent_success_is_that_of_whole_iterations_with_256_fresh_episodes() -> None:
    found = result([[6, 0.95]], fresh=96)
    found["iterations"] = [[96, 32, share, 0, 1.0, 1.0] for share in (0.9, 0.9, 0.3, 0.8, 0.9, 0.9)]
    # Three iterations hold 288: (0.9 + 0.9 + 0.3) / 3 = 0.7, 0.67, 0.67, (0.8 + 0.9 + 0.9) / 3 = 0.87.
    assert to_recent(found, "fresh") == 6 * 96


def test_mean_success_goes_on_with_what_the_last_evaluations_gave() -> None:
    # 6 x 128 = 768 episodes at 0.5, 256 more at (0.9 + 0.96) / 2 = 0.93
    assert mean_success(result([[5, 0.9], [6, 0.96]]), 1024) == pytest.approx((768 * 0.5 + 256 * 0.93) / 1024)


def test_run_that_never_got_there_counts_as_longer_than_any_other() -> None:
    assert interval([1.0, math.inf, 2.0, math.inf, 3.0]).median == 3.0
    assert interval([1.0, math.inf, math.inf]).median == math.inf
    assert interval([1.0, 1.0, math.inf]).high == math.inf
    compared = beside(
        {("dense", seed): cost for seed, cost in enumerate([5.0, 5.0, math.inf, math.inf, 5.0])},
        {("dense", seed): cost for seed, cost in enumerate([4.0, math.inf, 4.0, math.inf])},
    )
    assert compared is not None
    # -1, +inf, -inf, and 0 where neither did: the middle of -inf, -1, 0, +inf
    assert compared.median == -0.5
