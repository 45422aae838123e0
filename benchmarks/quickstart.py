"""CPU-seconds of the quickstart to its target, beside those of another checkout of the project.

Both train the same warmed-up model, seed by seed, with the command people type: evaluations count. Which comes first
alternates. `python -m benchmarks.quickstart --beside FOLDER` takes ten to twenty minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from benchmarks._goals import show
from benchmarks._replay_figures import interval
from benchmarks._replay_runs import ROOT

GOALS = {"ratio": "<= 0.6", "ratio_high": "<= 1"}
_CONFIG = "configs/quickstart.yaml"
TARGET = 0.95
"""The quickstart's own: it ends there."""


def main(arguments: Sequence[str] = ()) -> dict[str, float]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quickstart", description=__doc__)
    parser.add_argument("--beside", type=Path, help="the other checkout; without it nothing is measured")
    parser.add_argument("--seeds", nargs="*", type=int, default=list(range(5)))
    given = parser.parse_args(arguments)
    if given.beside is None:
        print("quickstart needs another checkout: python -m benchmarks.quickstart --beside FOLDER")
        return {}
    ratios: dict[int, float] = {}
    for number, seed in enumerate(given.seeds):
        with tempfile.TemporaryDirectory() as folder:
            model = _warmed_up(seed, Path(folder))
            sides = [ROOT, given.beside.resolve()]
            found = {
                side: _cpu_seconds(side, seed, model, Path(folder))
                for side in (sides if number % 2 == 0 else sides[::-1])
            }
        mine, other = (found[side] for side in sides)
        ratios[seed] = mine / other
        print(f"  seed {seed}: {mine:.1f} CPU-s, {other:.1f} beside it: {ratios[seed]:.2f}", flush=True)
    ratio = interval(ratios)
    figures = {"ratio": ratio.median, "ratio_low": ratio.low, "ratio_high": ratio.high}
    show(figures, GOALS)
    return figures


def _warmed_up(seed: int, folder: Path) -> Path:
    told = _train(ROOT, f"run.seed={seed}", f"run.folder={folder}", "run.iterations=1", "evaluation.tasks=1")
    return Path(str(told["folder"])) / "model"


def _cpu_seconds(side: Path, seed: int, model: Path, folder: Path) -> float:
    """Infinite where the run ended without its target."""
    before = _children_cpu()
    told = _train(side, f"run.seed={seed}", f"run.folder={folder}", f"model.path={model}")
    took = _children_cpu() - before
    database = sqlite3.connect(Path(str(told["folder"])) / "replay.sqlite")
    with closing(database):
        last = database.execute(
            "select value from metrics where name = 'eval/success' order by iteration desc limit 2"
        ).fetchall()
    return took if min(success for (success,) in last) >= TARGET else math.inf


def _train(side: Path, *settings: str) -> dict[str, object]:
    sets = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "agentloop", "train", _CONFIG, "--json", *sets]
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(side)}
    done = subprocess.run(command, cwd=side, env={**os.environ, **quiet}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{side} must train its quickstart, got exit code {done.returncode}:\n{done.stderr[-2000:]}")
    told: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return told


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main(sys.argv[1:])
