"""One run of an arm: from a warmed-up model to the target, with what it took, evaluations apart."""

from __future__ import annotations

import datetime
import fcntl
import json
import math
import os
import shutil
import sqlite3
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
from agentloop.environments import load_environment
from agentloop.learning.update_stats import ESS_BY_AGE
from agentloop.rollouts.evaluation import evaluate
from agentloop.runs.process import seed_process
from agentloop.runs.run_folder import create_run_folder
from agentloop.training.components import Components, build_components, starting_model
from agentloop.training.loop import Loop
from agentloop.training.loop_state import LoopState
from benchmarks._replay_arms import BUDGET, COMMON, TARGET, TASKS, Settings
from replay.locate import DATABASE
from replay.records import RunRecord

ROOT = Path(__file__).parents[1]
WINDOW = 256
"""Fresh episodes between evaluations, and those whose success says whether to begin with them. Evaluations cost as much
as what is between them; every task that is trained on is new, so that fresh episodes tell of held-out success, too."""
_NEAR = 0.8
ITERATION = ("fresh", "replayed", "success", "calls", "cpu", "wall")
"""What is kept of each iteration: rows of either stream, success and tool calls of the fresh ones, and seconds."""
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


def configuration(settings: Settings, *, seed: int, folder: Path) -> RunConfig:
    given = {"run.seed": seed, "run.folder": str(folder)} | dict(settings)
    return load_config(
        ROOT / "configs" / "quickstart.yaml", [f"{key}={json.dumps(value)}" for key, value in given.items()]
    )


def starting_point(task: str, seed: int, work: Path) -> Path:
    """The warmed-up model that all arms of this seed begin with; made at first use, one process at a time."""
    name = TASKS[task].start or task
    target = work / "start" / f"{name}-{seed}"
    work.mkdir(parents=True, exist_ok=True)
    with (work / f"start-{name}-{seed}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            config = configuration({**COMMON, **TASKS[name].settings}, seed=seed, folder=work / "warm-up")
            folder = create_run_folder(config)
            seed_process(config)
            starting_model(folder, LastFigures())
            target.parent.mkdir(exist_ok=True)
            folder.model.rename(target)
            shutil.rmtree(folder.path)
    return target


def _iterations(settings: Settings) -> int:
    """In which the budget is spent: the learning rate is then the same at the same number of fresh episodes.

    One more than that, for the last one would evaluate by itself.
    """
    config = configuration(settings, seed=0, folder=ROOT)
    return math.ceil(BUDGET / (config.batch.trajectories * (1.0 - config.replay.fraction))) + 1


def run_arm(task: str, settings: Settings, seed: int, work: Path, *, budget: int | None = None) -> Result:
    """Train until held-out success was at least TARGET in two evaluations in a row, or the budget is spent.

    A smaller `budget` than BUDGET ends the run before, and changes nothing else.
    """
    start = starting_point(task, seed, work)
    everything = {**COMMON, **TASKS[task].settings, "model.path": str(start), **settings}
    everything = {"run.iterations": _iterations(everything), **everything}
    config = configuration(everything, seed=seed, folder=work / "runs")
    folder = create_run_folder(config)
    seed_process(config)
    display = LastFigures()
    try:
        with closing(build_components(folder, display, checkpoint=None, first=start)) as parts:
            begin_run(parts)
            result = _train(Loop(parts, LoopState()), display, budget=budget or BUDGET)
    finally:
        shutil.rmtree(folder.path)
    return {
        "task": task,
        "seed": seed,
        "settings": dict(settings),
        **result,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
    }


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
    least_ess, least_factor, fresh, evaluated = 1.0, 1.0, 0, 0
    while fresh < budget and not _reached(evaluations):
        cpu, wall = time.process_time(), time.perf_counter()
        loop.iterate(len(iterations) + 1)
        seconds = [round(time.process_time() - cpu, 3), round(time.perf_counter() - wall, 3)]
        told = display.metrics
        # Without a fresh episode there is no success; calls are counted at the end.
        row = [told["batch/fresh"], told["batch/replay"], told.get("rollout/success", 0.0), 0, *seconds]
        iterations.append([int(row[0]), int(row[1]), round(row[2], 5), *row[3:]])
        fresh += int(told["batch/fresh"])
        least_ess = min([least_ess, *(value for name, value in told.items() if name.startswith(ESS_BY_AGE))])
        least_factor = min(least_factor, told.get("replay/controller_factor", 1.0))
        due = fresh // WINDOW > evaluated // WINDOW and recent_success(iterations) >= _NEAR
        if due or fresh >= budget:
            evaluated = fresh
            evaluations.append([len(iterations), round(held_out_success(loop.components), 5)])
    for iteration, calls in _tool_calls(loop.components):
        iterations[iteration - 1][ITERATION.index("calls")] = calls
    return {
        "iterations": iterations,
        "evaluations": evaluations,
        "least_ess_by_age": round(least_ess, 3),
        "least_factor": round(least_factor, 3),
    }


def _reached(evaluations: list[list[float]]) -> bool:
    return len(evaluations) > 1 and min(success for _, success in evaluations[-2:]) >= TARGET


def recent_success(iterations: list[list[float]]) -> float:
    """Of the newest iterations that hold WINDOW fresh episodes together; 0 while there are fewer."""
    fresh, successes = 0.0, 0.0
    for row in reversed(iterations):
        fresh, successes = fresh + row[0], successes + row[0] * row[2]
        if fresh >= WINDOW:
            return successes / fresh
    return 0.0


def _tool_calls(parts: Components) -> list[tuple[int, int]]:
    """By iteration, of the fresh episodes."""
    query = "select iteration, sum(num_tool_calls) from trajectories group by iteration"
    with closing(sqlite3.connect(f"file:{parts.folder.path / DATABASE}?mode=ro", uri=True)) as connection:
        return connection.execute(query).fetchall()


def held_out_success(parts: Components) -> float:
    """As `agentloop evaluate` has it, without the tools' delay: evaluations are no part of what is measured."""
    config, factory = parts.config, parts.actors.factory
    options = {**config.environment.options, "delay_s": 0.0}
    quick = load_environment(config.environment.name, options, factory.registered)
    return evaluate(replace(parts.actors, factory=quick), parts.source, config).success


def commit() -> str:
    """Of the code that is running; `unknown` where it is not a checkout."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def add_result(path: Path, result: Result) -> None:
    """One line, in one write: several processes may add to the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), "w") as stream:
        stream.write(json.dumps(result) + "\n")


def read_results(path: Path) -> list[Result]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
