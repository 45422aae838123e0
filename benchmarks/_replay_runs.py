"""One run of the study: from a warmed-up model to the target, with what it took, evaluations apart."""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from agentloop.config import RunConfig
from agentloop.config.config_file import load_config, to_plain
from agentloop.environments import load_environments
from agentloop.rollouts.evaluation import evaluate
from agentloop.rollouts.rewards import open_scorer
from agentloop.runs.checkpoint import seed_process
from agentloop.runs.run_folder import create_run_folder
from agentloop.training.components import Components, build_components
from agentloop.training.loop import Loop
from agentloop.training.loop_state import LoopState
from agentloop.training.starting_model import starting_model
from benchmarks._replay_arms import BUDGET, STARTS, TARGET, TASKS, TUNING_SEEDS, Job, Values
from benchmarks._replay_curriculum import short_first
from replay.records import RunRecord

ROOT = Path(__file__).parents[1]
_BASE = Path(__file__).with_name("replay_value.yaml")
WINDOW = 256
"""Fresh episodes whose success stands for held-out success: every task that is trained on is new."""
_EVERY, _NEAR = 128, 0.8
"""Fresh episodes between evaluations, and the success of as many from which on there are any: they take time."""
ITERATION = ("fresh", "replayed", "success", "runs", "cpu", "wall")
"""What is kept of each iteration: rows of either stream; success of the fresh ones, and how many of their tool calls
were run; CPU-seconds and seconds."""
Result = dict[str, Any]


@dataclass
class LastFigures:
    """Keeps the figures of the last iteration, and tells nobody."""

    metrics: dict[str, float] = field(default_factory=dict)

    def phase(self, name: str, done: int, total: int) -> None:
        return

    def iteration(self, number: int, total: int, metrics: Mapping[str, float]) -> None:
        self.metrics = dict(metrics)

    def note(self, text: str) -> None:
        return

    def close(self) -> None:
        return


def configuration(values: Values, *, seed: int, folder: Path) -> RunConfig:
    given = {"run.seed": seed, "run.folder": str(folder)} | dict(values)
    return load_config(_BASE, [f"{key}={json.dumps(value)}" for key, value in given.items()])


def starting_point(task: str, seed: int, work: Path) -> Path:
    """The warmed-up model that a seed begins with; made at first use, one process at a time."""
    name = TASKS[task].start or task
    number = TUNING_SEEDS[0] if seed in TUNING_SEEDS else seed % STARTS
    target = work / "start" / f"{name}-{number}"
    work.mkdir(parents=True, exist_ok=True)
    with (work / f"start-{name}-{number}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            config = configuration(TASKS[name].values, seed=number, folder=work / "warm-up")
            folder = create_run_folder(config)
            seed_process(config)
            starting_model(folder, LastFigures())
            target.parent.mkdir(exist_ok=True)
            folder.start.rename(target)
            shutil.rmtree(folder.path)
    return target


def play(job: Job, work: Path, *, budget: int) -> Result:
    """Train until held-out success was at least TARGET in two evaluations in a row, or the budget is spent.

    The learning rate falls along BUDGET fresh episodes, also where the budget is smaller.
    """
    start = starting_point(job.task, job.seed, work)
    values = {**TASKS[job.task].values, "model.path": str(start), **job.values}
    config = configuration({"run.iterations": _iterations(values), **values}, seed=job.seed, folder=work / "runs")
    folder = create_run_folder(config)
    seed_process(config)
    display = LastFigures()
    try:
        with closing(build_components(folder, display, checkpoint=None)) as parts:
            begin_run(parts)
            chosen = short_first(parts, job.task) if job.is_short_first else parts
            outcome = _train(Loop(chosen, LoopState()), display, budget=budget)
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


def begin_run(parts: Components) -> None:
    parts.store.add_run(
        RunRecord(
            id=parts.run_id,
            name=parts.folder.path.name,
            config=to_plain(parts.config),
            authors=parts.authors.to_json(),
            authors_hash=parts.authors.hash,
            code_version=version("agentloop-replay"),
            fingerprint=parts.fingerprint,
        )
    )
    parts.publisher.publish(0)


def _train(loop: Loop, display: LastFigures, *, budget: int) -> Result:
    iterations: list[list[float]] = []
    evaluations: list[list[float]] = []
    fresh, evaluated = 0, 0
    while fresh < budget and not _is_reached(evaluations):
        cpu, wall = time.process_time(), time.perf_counter()
        loop.iterate(len(iterations) + 1)
        seconds = [round(time.process_time() - cpu, 3), round(time.perf_counter() - wall, 3)]
        iterations.append([*_figures(display.metrics), *seconds])
        fresh += int(iterations[-1][0])
        due = fresh // _EVERY > evaluated // _EVERY and recent_success(iterations, _EVERY) >= _NEAR
        if due or fresh >= budget:
            evaluated = fresh
            evaluations.append([len(iterations), round(held_out_success(loop.components), 5)])
    return {"iterations": iterations, "evaluations": evaluations}


def _figures(told: Mapping[str, float]) -> list[float]:
    fresh = int(told["batch/fresh"])
    runs = int(told.get("tools/runs", 0.0))
    return [fresh, int(told["batch/replay"]), round(told.get("rollout/success", 0.0), 5), runs]


def _is_reached(evaluations: list[list[float]]) -> bool:
    return len(evaluations) > 1 and min(success for _, success in evaluations[-2:]) >= TARGET


def recent_success(iterations: list[list[float]], episodes: int) -> float:
    """Of the newest iterations that hold so many fresh episodes together; 0 while there are fewer."""
    fresh, successes = 0.0, 0.0
    for row in reversed(iterations):
        fresh, successes = fresh + row[0], successes + row[0] * row[2]
        if fresh >= episodes:
            return successes / fresh
    return 0.0


def held_out_success(parts: Components) -> float:
    """As `agentloop evaluate` has it, without the tools' delay: evaluations are no part of what is measured."""
    config = parts.config
    quick = load_environments(config, {}, options={"delay_s": 0.0})
    actors = replace(parts.actors, environments=quick)
    return evaluate(actors, parts.source, config, scorer=open_scorer(config, quick)).success


def commit() -> str:
    """Of the code that is running; `unknown` where it is not a checkout."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def add_result(path: Path, result: Result) -> None:
    """One line, in one write: several processes may add to the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), "w") as stream:
        stream.write(json.dumps(result) + "\n")


def read_results(path: Path) -> list[Result]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
