"""Floors under the reported figures: ratios of CPU-seconds within one run, far below those of a quiet machine."""

from __future__ import annotations

from pathlib import Path

from benchmarks.__main__ import environment, names
from benchmarks._goals import verdict
from benchmarks.context import measure as measure_context
from benchmarks.rollout import measure as measure_rollout

ROOT = Path(__file__).parents[2]
ATTEMPTS = 3


def test_rollout_engine_is_half_again_as_fast_as_generate() -> None:
    best = 0.0
    for _ in range(ATTEMPTS):  # neighbours on the same machine take caches and memory bandwidth
        best = max(best, measure_rollout(episodes=128, rounds=1)["speedup"])
        if best >= 1.5:
            return
    raise AssertionError(f"{best:.2f}x model.generate's episodes per CPU-second in the best of {ATTEMPTS} attempts")


def test_prompts_of_forty_turns_cost_a_sixth_of_rendering_anew_and_grow_with_what_is_new() -> None:
    # Rendering anew costs (40 + 1) / 2 = 20 times the tokens; four times the turns are four times the new tokens.
    for _ in range(ATTEMPTS):
        found = measure_context((10, 40), reply=40, result=200)
        if found["speedup_40"] >= 6 and found["growth"] <= 7:
            return
    raise AssertionError(f"{found} in the last of {ATTEMPTS} attempts")


def test_benchmarks_say_on_what_they_ran() -> None:
    assert set(environment()) == {"hardware", "python", "torch", "sqlite", "date"}
    assert all(environment().values())


def test_benchmarks_are_found_by_their_files() -> None:
    files = {path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py")}
    assert {"context", "rollout"} <= files
    assert set(names()) == files


def test_goals_are_met_at_their_bound_and_missed_beyond() -> None:
    goals = {"rate": ">= 0.5", "time": "<= 3.5"}
    assert verdict("rate", 0.5, goals) == "goal >= 0.5   PASS"
    assert verdict("rate", 0.49, goals) == "goal >= 0.5   miss"
    assert verdict("time", 3.5, goals) == "goal <= 3.5   PASS"
    assert verdict("time", 3.51, goals) == "goal <= 3.5   miss"
    assert verdict("bytes", 1.0, goals) == ""
