"""CPU-seconds and fresh episodes to 90 % held-out success: agentloop against TRL's GRPOTrainer.

Both train the quickstart's warmed-up model on the same tasks in the same order: 16 tasks of 8 attempts, two optimizer
steps, one learning rate throughout, the same clipping and AdamW. Each run is a process of its own. This one looks at
its weights after every second iteration, with one evaluator on 256 held-out tasks, while the run's clock stands still.

`python -m benchmarks.vs_trl` takes about ten minutes; `make bench` runs one pair.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model as load_weights

from agentloop.config.config_file import load_config
from agentloop.engines.local.local_generator import LocalGenerator
from agentloop.environments import open_tasks
from agentloop.models.loading import load_model
from agentloop.rollouts.actors import make_actors
from agentloop.rollouts.evaluation import evaluate
from agentloop.rollouts.rewards import open_scorer
from agentloop.runs.display import ConsoleDisplay
from agentloop.runs.run_folder import create_run_folder
from agentloop.training.starting_model import starting_model
from benchmarks.__main__ import table
from benchmarks._peer import GO_ON, MOST_ITERATIONS, QUICKSTART, ROOT

GOALS = {"cpu_ratio": ">= 5"}
TARGET = 0.9
EVALUATE_EVERY = 2
SEEDS = (3, 4)
ARMS: Mapping[str, str] = {"agentloop": "_peer_agentloop", "trl": "_peer_trl"}
"""Modules of the two sides."""


@dataclass(frozen=True)
class Run:
    """One arm with one seed."""

    iterations: list[dict[str, Any]]
    """What the side told after each."""
    success: list[tuple[int, float]]
    """(iterations made, held-out success)."""

    @property
    def reached(self) -> int | None:
        """Iterations to the first of two evaluations in a row that are at or above the target."""
        pairs = zip(self.success, self.success[1:], strict=False)
        return next((made for (made, one), (_, other) in pairs if min(one, other) >= TARGET), None)

    def to_target(self, what: str) -> float:
        """Sum of `what` over the iterations until then; infinite if it did not happen."""
        return math.inf if self.reached is None else math.fsum(told[what] for told in self.iterations[: self.reached])


class Judge:
    """Makes the warmed-up model of one seed, and says how good weights are."""

    def __init__(self, folder: Path, seed: int) -> None:
        options = [f"run.seed={seed}", f"run.folder={folder}", "run.name=start", "model.device=cpu"]
        config = load_config(QUICKSTART, options)
        torch.set_num_threads(config.run.threads)
        torch.manual_seed(seed)
        run = create_run_folder(config)
        self.model = Path(starting_model(run, ConsoleDisplay(stderr=True)))
        self.seed, self.folder = seed, folder
        self._config = config
        self._loaded = load_model(config.model, self.model)
        environments, self._source = open_tasks(config)
        self._scorer = open_scorer(config, environments)
        loaded = self._loaded
        self._generator = LocalGenerator(loaded.model, stop_ids=loaded.stop_ids)
        self._actors = make_actors(config, environments, loaded, self._generator, vocab_size=loaded.vocab_size)

    def success(self, weights: Path) -> float:
        load_weights(self._loaded.model, str(weights))
        self._generator.published(self._generator.policy_version + 1)
        return evaluate(self._actors, self._source, self._config, scorer=self._scorer).success


def run_arm(judge: Judge, arm: str) -> Run:
    folder = judge.folder / arm
    folder.mkdir()
    weights = folder / "weights.safetensors"
    command = [sys.executable, "-m", f"benchmarks.{ARMS[arm]}", str(judge.model), str(judge.seed), str(weights)]
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}
    log = folder / "log.txt"
    run = Run([], [])
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": {**os.environ, **quiet}}
    with log.open("w") as errors, subprocess.Popen(command, cwd=ROOT, stderr=errors, **pipes) as side:
        assert side.stdin is not None and side.stdout is not None
        for line in side.stdout:
            run.iterations.append(json.loads(line))
            made = len(run.iterations)
            if made % EVALUATE_EVERY == 0:
                run.success.append((made, judge.success(weights)))
            goes_on = run.reached is None and made < MOST_ITERATIONS
            side.stdin.write(f"{GO_ON if goes_on else 'stop'}\n")
            side.stdin.flush()
    if side.returncode != 0:
        raise RuntimeError(f"{arm} must end well, got exit code {side.returncode}:\n{log.read_text()[-2000:]}")
    return run


def measure(seeds: Sequence[int]) -> dict[str, list[Run]]:
    """The runs of each arm, one per seed; which comes first alternates."""
    runs: dict[str, list[Run]] = {arm: [] for arm in ARMS}
    for number, seed in enumerate(seeds):
        with tempfile.TemporaryDirectory() as folder:
            judge = Judge(Path(folder), seed)
            for arm in list(ARMS)[:: 1 if number % 2 == 0 else -1]:
                run = run_arm(judge, arm)
                runs[arm].append(run)
                print(f"  seed {seed} {arm}: {_curve(run)}", flush=True)
    return runs


def _curve(run: Run) -> str:
    points = ", ".join(f"{success:.3f}" for _, success in run.success)
    where = "not reached" if run.reached is None else f"{run.to_target('cpu_s'):.1f} cpu-s"
    return f"{where}; success every {EVALUATE_EVERY} iterations: {points}"


def figures(runs: Mapping[str, Sequence[Run]]) -> dict[str, float]:
    """Means over seeds; ratios are TRL's to agentloop's."""
    found: dict[str, float] = {}
    for arm, each in runs.items():
        found[f"{arm}_cpu_s_to_90"] = statistics.fmean(run.to_target("cpu_s") for run in each)
        found[f"{arm}_fresh_to_90"] = statistics.fmean(run.to_target("fresh") for run in each)
        found[f"{arm}_peak_mib"] = max(told["peak_mib"] for run in each for told in run.iterations)
        # Without the first, which pays for lazy set-up.
        medians = [statistics.median(told["cpu_s"] for told in run.iterations[1:]) for run in each]
        found[f"{arm}_iteration_cpu_s"] = statistics.fmean(medians)
    for name, figure in (("cpu", "cpu_s_to_90"), ("fresh", "fresh_to_90"), ("iteration", "iteration_cpu_s")):
        found[f"{name}_ratio"] = found[f"trl_{figure}"] / found[f"agentloop_{figure}"]
    found["memory_ratio"] = found["trl_peak_mib"] / found["agentloop_peak_mib"]
    return found


def main(seeds: Sequence[int] = SEEDS[:1]) -> dict[str, float]:
    missing = [name for name in ("trl", "datasets", "accelerate") if find_spec(name) is None]
    if missing:
        print(f"vs_trl needs {', '.join(missing)}: pip install -e '.[dev]', and trl with --no-deps")
        return {}
    print(f"{', '.join(ARMS)} to {TARGET:.0%} held-out success")
    return figures(measure(seeds))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vs_trl")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    print(table("vs_trl", main(parser.parse_args().seeds)))
