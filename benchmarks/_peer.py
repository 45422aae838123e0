"""What both sides of `vs_trl` share: the run they make, the clock of its phases, and the talk with the judge.

A side is a process of its own, so that its memory is its own. After each iteration it writes its weights, tells what
the iteration took and waits until the judge, the process that began it, says whether to go on. What is written and
waited is not counted.
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path

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


def order() -> argparse.Namespace:
    """What a side is asked for: the warmed-up model's folder, a seed, and where the judge looks for weights."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("seed", type=int)
    parser.add_argument("weights", type=Path)
    return parser.parse_args()


def run_config(asked: argparse.Namespace) -> RunConfig:
    """The quickstart's, at one learning rate throughout; without evaluations, and with the buffer alone on disk."""
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


class Talk:
    """A side's end of the talk. The clock runs from `begin`, and stands still while the judge looks."""

    def __init__(self, weights: Path) -> None:
        self._weights, self._words = weights, sys.stdout
        sys.stdout = sys.stderr  # what a library prints is for people

    def begin(self) -> None:
        self._cpu = time.process_time()

    def goes_on(self, model: torch.nn.Module, *, fresh: int) -> bool:
        """Tell of the iteration that has just ended, with `fresh` new episodes; whether the judge wants another."""
        cpu, peak = time.process_time() - self._cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        save_model(model, str(self._weights))
        print(json.dumps({"cpu_s": cpu, "fresh": fresh, "peak_mib": peak}), file=self._words, flush=True)
        answer = sys.stdin.readline().strip()
        self.begin()
        return answer == GO_ON
