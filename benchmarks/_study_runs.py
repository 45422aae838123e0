"""One run of the study: from a warmed-up model to the target, with what it took, evaluations apart."""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import math
import shutil
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from agentloop.runs.process import seed_process
from agentloop.runs.run_folder import create_run_folder
from agentloop.training.components import build_components, starting_model
from agentloop.training.loop import Loop
from agentloop.training.loop_state import LoopState
from benchmarks._replay_runs import ROOT, LastFigures, begin_run, commit, configuration, held_out_success
from benchmarks._study_arms import BUDGET, COMMON, STARTS, TARGET, TASKS, TUNING_SEEDS, Values

WINDOW = 256
"""Fresh episodes between evaluations, and those whose success says whether to begin with them."""
_NEAR = 0.8
ITERATION = ("fresh", "replayed", "success", "calls", "runs", "cpu", "wall")
"""What is kept of each iteration: rows of either stream; success of the fresh ones, their tool calls, and how many of
those were run; CPU-seconds and seconds."""
Outcome = dict[str, Any]


def starting_point(task: str, seed: int, work: Path) -> Path:
    """The warmed-up model that a seed begins with; made at first use, one process at a time."""
    name = TASKS[task].start or task
    number = TUNING_SEEDS[0] if seed in TUNING_SEEDS else seed % STARTS
    target = work / "start" / f"{name}-{number}"
    work.mkdir(parents=True, exist_ok=True)
    with (work / f"start-{name}-{number}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            config = configuration({**COMMON, **TASKS[name].values}, seed=number, folder=work / "warm-up")
            folder = create_run_folder(config)
            seed_process(config)
            starting_model(folder, LastFigures())
            target.parent.mkdir(exist_ok=True)
            folder.model.rename(target)
            shutil.rmtree(folder.path)
    return target


def play(task: str, values: Values, seed: int, work: Path, *, budget: int) -> Outcome:
    """Train until held-out success was at least TARGET in two evaluations in a row, or the budget is spent.

    The learning rate falls along BUDGET fresh episodes, also where the budget is smaller.
    """
    start = starting_point(task, seed, work)
    everything = {**COMMON, **TASKS[task].values, "model.path": str(start), **values}
    config = configuration({"run.iterations": _iterations(everything), **everything}, seed=seed, folder=work / "runs")
    folder = create_run_folder(config)
    seed_process(config)
    display = LastFigures()
    try:
        with closing(build_components(folder, display, checkpoint=None, first=start)) as parts:
            begin_run(parts)
            outcome = _train(Loop(parts, LoopState()), display, budget=budget)
    finally:
        shutil.rmtree(folder.path)
    return {
        **outcome,
        "start": hashlib.sha256((start / "model.safetensors").read_bytes()).hexdigest()[:12],
        "processor": _processor(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
    }


def _iterations(values: Values) -> int:
    """In which BUDGET is spent, and one more: the last one would evaluate by itself."""
    config = configuration(values, seed=0, folder=ROOT)
    return math.ceil(BUDGET / (config.batch.trajectories * (1.0 - config.replay.fraction))) + 1


def _train(loop: Loop, display: LastFigures, *, budget: int) -> Outcome:
    iterations: list[list[float]] = []
    evaluations: list[list[float]] = []
    fresh, evaluated = 0, 0
    while fresh < budget and not _is_reached(evaluations):
        cpu, wall = time.process_time(), time.perf_counter()
        loop.iterate(len(iterations) + 1)
        seconds = [round(time.process_time() - cpu, 3), round(time.perf_counter() - wall, 3)]
        iterations.append([*_figures(display.metrics), *seconds])
        fresh += int(iterations[-1][0])
        due = fresh // WINDOW > evaluated // WINDOW and recent_success(iterations) >= _NEAR
        if due or fresh >= budget:
            evaluated = fresh
            evaluations.append([len(iterations), round(held_out_success(loop.components), 5)])
    return {"iterations": iterations, "evaluations": evaluations}


def _figures(told: Mapping[str, float]) -> list[float]:
    fresh = int(told["batch/fresh"])
    runs = int(told.get("tools/runs", 0.0))
    calls = round(runs / (1.0 - told.get("tools/replayed", 0.0)))
    return [fresh, int(told["batch/replay"]), round(told.get("rollout/success", 0.0), 5), calls, runs]


def _is_reached(evaluations: list[list[float]]) -> bool:
    return len(evaluations) > 1 and min(success for _, success in evaluations[-2:]) >= TARGET


def recent_success(iterations: list[list[float]]) -> float:
    """Of the newest iterations that hold WINDOW fresh episodes together; 0 while there are fewer."""
    fresh, successes = 0.0, 0.0
    for row in reversed(iterations):
        fresh, successes = fresh + row[0], successes + row[0] * row[2]
        if fresh >= WINDOW:
            return successes / fresh
    return 0.0


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
