"""CPU-seconds of the quickstart to its target, and how many of its tool calls were run.

With `--against FOLDER`, another checkout of the project, also the ratio to that one's: both train the same warmed-up
model, seed by seed, with the command people type, evaluations included. Which comes first alternates.
"""

from __future__ import annotations

import argparse
import math
import sqlite3
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks._goals import show
from benchmarks._replay_figures import interval
from benchmarks._trained import ROOT, run, warmed_up

GOALS = {"calls_run": "<= 0.4", "ratio": "<= 0.6", "ratio_high": "<= 1"}
_CONFIG = "configs/quickstart.yaml"
TARGET = 0.95
"""The quickstart's own: it ends there."""


_LAST = "select value from metrics where name = 'eval/success' order by iteration desc limit 2"
_CALLS = """
select sum(runs.value), sum(runs.value / (1 - replayed.value)) from metrics runs join metrics replayed
on (runs.run, runs.iteration) = (replayed.run, replayed.iteration)
where runs.name = 'tools/runs' and replayed.name = 'tools/replayed'
"""


@dataclass(frozen=True)
class Outcome:
    cpu_s: float
    """Infinite where the run ended without its target."""
    calls_run: float
    """Share of the tool calls; the others were answered from memory."""


def main(arguments: Sequence[str] = ()) -> dict[str, float]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quickstart", description=__doc__)
    parser.add_argument("--against", type=Path, help="the other checkout")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    given = parser.parse_args(arguments)
    sides = [ROOT] if given.against is None else [ROOT, given.against.resolve()]
    mine: dict[int, Outcome] = {}
    ratios: dict[int, float] = {}
    for number, seed in enumerate(given.seeds):
        with tempfile.TemporaryDirectory() as folder:
            model = warmed_up(_CONFIG, {"run.seed": seed, "run.folder": folder})
            order = sides if number % 2 == 0 else sides[::-1]
            found = {side: _outcome(side, seed, model, Path(folder)) for side in order}
        mine[seed] = found[ROOT]
        print(f"  seed {seed}: {', '.join(f'{side.name} {found[side].cpu_s:.1f} CPU-s' for side in sides)}", flush=True)
        if len(sides) > 1:
            ratios[seed] = found[ROOT].cpu_s / found[sides[1]].cpu_s
    figures = {
        name: statistics.median(getattr(each, name) for each in mine.values()) for name in ("cpu_s", "calls_run")
    }
    if ratios:
        ratio = interval(ratios)
        figures |= {"ratio": ratio.median, "ratio_low": ratio.low, "ratio_high": ratio.high}
    show(figures, GOALS)
    return figures


def _outcome(side: Path, seed: int, model: Path, folder: Path) -> Outcome:
    place = {"run.seed": seed, "run.folder": str(folder), "model.path": str(model)}
    made, took = run("train", _CONFIG, place, folder=side, checkout=side)
    with closing(sqlite3.connect(Path(made["folder"]) / "replay.sqlite")) as database:
        last = [success for (success,) in database.execute(_LAST)]
        ((ran, called),) = database.execute(_CALLS)
    return Outcome(took if min(last) >= TARGET else math.inf, ran / called)


if __name__ == "__main__":
    main(sys.argv[1:])
