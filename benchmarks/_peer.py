"""What both sides of `vs_trl` share: the run they make, the clock of its phases, and the talk with the judge.

A side is a process of its own, so that its memory is its own. After each iteration it writes its weights, tells what
the iteration took and waits until the judge, the process that began it, says whether to go on. What is written and
waited is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import save_model

from agentloop.config import RunConfig
from agentloop.config.config_file import load_config, load_plain, to_plain

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
MOST_ITERATIONS = 40
UPDATES = 2
"""Optimizer steps per 128 episodes."""
GO_ON = "go on"


@dataclass(frozen=True)
class Order:
    """What a side is asked for."""

    model: Path
    """Folder of the warmed-up model."""
    seed: int
    weights: Path
    """Where the judge looks for the weights of the last iteration."""


def order(arguments: list[str] | None = None) -> Order:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    return Order(**vars(parser.parse_args(arguments)))


def run_config(asked: Order) -> RunConfig:
    """The quickstart's, at one learning rate throughout; a side evaluates nothing and keeps nothing on disk but its
    buffer."""
    quickstart = load_config(QUICKSTART)
    changes = {
        "run.seed": asked.seed,
        "run.folder": asked.weights.parent / "runs",
        "run.stop_at_success": "null",
        "model.path": asked.model,
        "model.device": "cpu",
        "optimizer.warmup_iterations": 0,
        "optimizer.schedule": "constant",
        "batch.mini_batch": quickstart.batch.trajectories // UPDATES,
        "evaluation.every": 0,
        "checkpoint.keep_policies": "none",
        "replay.fraction": 0,
        "replay.schedule.final": "null",
        "replay.schedule.shape": "constant",
    }
    # Over a whole configuration: with a model's path alone, replies would have the length that suits a large model.
    return load_plain(to_plain(quickstart), [f"{key}={value}" for key, value in changes.items()])


@dataclass
class Phases:
    """Seconds of one iteration by phase: of the CPU, or by another clock."""

    clock: Callable[[], float] = time.process_time
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = self.clock()
        try:
            yield
        finally:
            self.seconds[name] += self.clock() - began

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            with self.timed(name):
                return function(*arguments, **options)

        return timed


class Talk:
    """A side's end of the talk. The clock runs from `begin`, and stands still while the judge looks."""

    def __init__(self, weights: Path, answers: IO[str] = sys.stdin) -> None:
        self._weights, self._answers, self._words = weights, answers, sys.stdout
        self.phases = Phases()
        sys.stdout = sys.stderr  # what a library prints is for people

    def begin(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()
        self.phases.seconds.clear()

    def goes_on(self, model: torch.nn.Module, *, fresh: int) -> bool:
        """Tell of the iteration that has just ended, with `fresh` new episodes; whether the judge wants another."""
        told = {
            "cpu_s": time.process_time() - self._cpu,
            "wall_s": time.perf_counter() - self._wall,
            "fresh": fresh,
            "phases": dict(self.phases.seconds),
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        save_model(model, str(self._weights))
        print(json.dumps(told), file=self._words, flush=True)
        answer = self._answers.readline().strip()
        self.begin()
        return answer == GO_ON
