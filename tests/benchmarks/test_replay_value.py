"""What the evidence says is what its runs gave, and what a figure of it means."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from agentloop.config.config_file import load_config
from benchmarks._replay_figures import STARTS, interval, less, mean_success, percent_more, to_target, with_tables
from benchmarks._trained import read
from benchmarks.replay_value import ARMS, CONFIG, FOUND, PAGES, RESULTS, settings, tables

SPOKEN = re.compile(r"\S+ \[[-+\d.,]+, (?:[-+\d.,]+|never)\]")


def result(evaluations: list[list[float]], *, fresh: int = 128, success: float = 0.5, iterations: int = 6) -> Any:
    """Iterations of 2 tool calls run per fresh episode, 2 CPU-seconds and 3 seconds each."""
    row = [fresh, 0, success, 2 * fresh, 2.0, 3.0]
    return {"iterations": [row] * iterations, "evaluations": evaluations, "seed": 0}


def reaching(iterations: int) -> Any:
    """A run that was at the target after so many iterations of 128 fresh episodes; 0: never."""
    reached = [[iterations, 0.9], [iterations + 1, 0.9]]
    return result(reached if iterations else [[6, 0.5]], iterations=max(6, iterations + 1))


def test_tables_of_the_pages_are_those_of_the_results_and_hold_the_intervals_that_are_spoken_of() -> None:
    found, made = tables(read(RESULTS)), re.compile(r"<!-- table: .*?<!-- end -->", flags=re.DOTALL)
    pages = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    assert {name: with_tables(page, found) for name, page in pages.items()} == pages
    cells = "".join(found.values())
    spoken = [each for page in pages.values() for each in SPOKEN.findall(made.sub("", page))]
    assert [each for each in spoken if f"| {each} |" not in cells] == []


@pytest.mark.parametrize("task", FOUND)
def test_every_arm_of_a_task_is_a_configuration_with_as_many_fresh_rows_as_it_was_tuned_to(task: str) -> None:
    for arm, (contender, _) in ARMS.items():
        if contender in FOUND[task]:
            given = [f"{key}={json.dumps(value)}" for key, value in settings(task, arm).items()]
            config = load_config(Path(CONFIG), given)
            assert round(config.batch.trajectories * (1 - config.replay.fraction)) == FOUND[task][contender][0]
            assert (config.replay.fraction > 0) == (contender != "on_policy")


def test_configuration_of_hindsight_is_the_setting_that_was_found() -> None:
    given = [f"{key}={json.dumps(value)}" for key, value in settings("sparse", "hindsight").items()]
    found, shipped = load_config(Path(CONFIG), given), load_config(Path("configs/hindsight.yaml"))
    for part in ("environment", "warm_up", "batch", "replay", "optimizer", "loss"):
        assert getattr(shipped, part) == getattr(found, part), part


def test_target_is_reached_at_the_first_of_two_evaluations_in_a_row() -> None:
    found = result([[2, 0.91], [3, 0.89], [4, 0.90], [5, 0.95]])
    assert to_target(found, "fresh") == 4 * 128
    assert to_target(found, "runs") == 4 * 256
    assert to_target(result([[2, 0.91], [4, 0.89]]), "fresh") == math.inf


def test_mean_success_goes_on_with_what_the_last_evaluations_gave() -> None:
    # 6 x 128 = 768 episodes at 0.5, 256 more at (0.9 + 0.96) / 2 = 0.93
    assert mean_success(result([[5, 0.9], [6, 0.96]]), 1024) == pytest.approx((768 * 0.5 + 256 * 0.93) / 1024)


def test_interval_draws_start_models_with_all_their_seeds_and_never_leaves_out_a_run() -> None:
    # Of two models, each is drawn twice with probability 1/4, both with 1/2.
    two = interval({0: 1.0, STARTS: 2.0, 1: 11.0, STARTS + 1: 12.0})
    assert (two.low, two.median, two.high) == (1.5, 6.5, 11.5)
    # Seeds of one model are no evidence of what others do.
    assert interval({0: 1.0, STARTS: 9.0}) == interval({0: 5.0})
    # Of three, all three times 1/27 each: beyond 2.5 % on either side.
    assert interval({0: 1.0, 1: 2.0, 2: 3.0}).low == 1.0
    assert interval(dict(enumerate([1.0, math.inf, 2.0, math.inf, 3.0]))).median == 3.0
    assert interval({0: 1.0, 1: 1.0, 2: math.inf}).high == math.inf


def test_differences_are_taken_seed_by_seed_and_never_flatter_the_arm() -> None:
    def fresh(mine: Any, other: Any) -> float:
        return percent_more(mine, other, "fresh")

    def seeded(costs: list[int]) -> list[Any]:
        return [{**reaching(cost), "seed": seed} for seed, cost in enumerate(costs)]

    # -25 %; never; half of the 6 iterations that the control had made in vain; no difference
    found = less(seeded([3, 0, 3, 0]), seeded([4, 5, 0, 0])[:4], fresh)
    assert found == {0: -25.0, 1: math.inf, 2: -50.0, 3: 0.0}
    # Neither got there: what both spent on as many fresh episodes.
    thrifty = {**reaching(0), "iterations": [[128, 0, 0.5, 64, 1.0, 3.0]] * 6}
    spent = [percent_more(thrifty, reaching(0), name) for name in ("fresh", "runs", "cpu", "wall")]
    assert spent == [0.0, -75.0, -50.0, 0.0]
