"""Floors under the reported figures: ratios of CPU-seconds within one run, far below those of a quiet machine."""

import math
from pathlib import Path

import pytest

from benchmarks.__main__ import verdict
from benchmarks.context import measure as measure_context
from benchmarks.gateway import measure as measure_gateway
from benchmarks.sessions import measure as measure_sessions
from benchmarks.train_step import measure as measure_train_step
from benchmarks.vs_trl import Run, figures
from tests.fakes.records import sql

ATTEMPTS = 3


def test_prompts_of_forty_turns_cost_a_quarter_of_rendering_anew() -> None:
    # Rendering anew reads (40 + 1) / 2 = 20 times the tokens.
    for _ in range(ATTEMPTS):
        found = measure_context((40,), rounds=3, reply=40, result=600)
        if found["speedup_40"] >= 4:
            return
    raise AssertionError(f"{found} in the last of {ATTEMPTS} attempts")


def test_a_step_by_length_is_a_fifth_faster_than_in_one_padded_batch_and_learns_the_same() -> None:
    # 8 rows of 4,093 tokens: 8,360 positions in one batch, 4,465 in four passes by length. `measure` times no ways
    # whose losses or gradients differ.
    ways = ("by_length", "one_padded")
    best = 0.0
    for _ in range(ATTEMPTS):
        found = measure_train_step("long_tail", names=ways, rows=8, rounds=1)
        best = max(best, found["long_tail_speed_to_one_padded"])
        if best >= 1.2:
            return
    raise AssertionError(f"{best:.2f}x the speed of one padded batch in the best of {ATTEMPTS} attempts")


def test_a_session_four_times_as_long_costs_at_most_six_times_as_much(tmp_path: Path) -> None:
    # What is done with every pair of requests costs sixteen times as much.
    for attempt in range(ATTEMPTS):
        (folder := tmp_path / str(attempt)).mkdir()
        found = measure_sessions(folder, requests=(150, 600), rounds=1)
        if max(found["row_growth"], found["under_way_growth"]) <= 6:
            return
    raise AssertionError(f"{found} in the last of {ATTEMPTS} attempts")


@pytest.mark.slow
def test_every_call_of_an_engine_is_paired_with_one_through_the_gateway(tmp_path: Path) -> None:
    found = measure_gateway(tmp_path, rounds=1, turns=1)
    alone = {"libraries_ms_p50", "libraries_ms_p99"}
    assert found.keys() == {"added_ms_p50", "added_ms_p99", "cpu_ms", "fsync_ms", *alone}
    assert all(math.isfinite(value) for value in found.values())
    assert sql(tmp_path / "h.sqlite", "select count(*) from session_nodes") == [(64,)]
    assert sql(tmp_path / "libraries.sqlite", "select count(*) from nodes") == [(64,)]


def run_of(seconds: float, success: list[float], *, fresh: int = 128) -> Run:
    """Evaluated after every second iteration."""
    told = {"cpu_s": seconds, "fresh": fresh, "peak_mib": 500.0}
    rates = [(2 * number, rate) for number, rate in enumerate(success, 1)]
    return Run([dict(told) for _ in range(2 * len(success))], rates)


def test_a_run_has_reached_its_target_at_the_first_of_two_evaluations_in_a_row() -> None:
    run = run_of(1.5, [0.2, 0.91, 0.89, 0.9, 0.95])
    assert run.reached == 8
    assert run.to_target("cpu_s") == 8 * 1.5
    assert run.to_target("fresh") == 8 * 128
    assert run_of(1.5, [0.2, 0.91, 0.89, 0.95]).to_target("cpu_s") == float("inf")


def test_ratios_beside_trl_are_its_figures_over_agentloops() -> None:
    runs = {"agentloop": [run_of(1.0, [0.9, 0.9])], "trl": [run_of(3.0, [0.5, 0.9, 0.9])]}
    found = figures(runs)
    assert found["cpu_ratio"] == (4 * 3.0) / (2 * 1.0)
    assert found["fresh_ratio"] == 2
    assert found["iteration_ratio"] == 3


def test_goals_are_met_at_their_bound_and_missed_beyond() -> None:
    goals = {"rate": ">= 0.5", "time": "<= 3.5"}
    assert verdict("rate", 0.5, goals) == "goal >= 0.5   PASS"
    assert verdict("rate", 0.49, goals) == "goal >= 0.5   miss"
    assert verdict("time", 3.5, goals) == "goal <= 3.5   PASS"
    assert verdict("time", 3.51, goals) == "goal <= 3.5   miss"
    assert verdict("bytes", 1.0, goals) == ""
