"""Learning runs of configs/strategies.yaml, through the front door: does a strategy act, and does the policy learn?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.fakes.runs import ROOT, rows


def strategies(folder: Path, *settings: str) -> Path:
    """The command people type; its run folder."""
    sets = [part for setting in (f"run.folder={folder}", *settings) for part in ("--set", setting)]
    command = [Path(sys.executable).with_name("agentloop"), "train", "configs/strategies.yaml", "--json", *sets]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Path(json.loads(done.stdout.splitlines()[-1])["folder"])


def metric(run: Path, name: str) -> list[float]:
    query = f"select value from metrics where name = '{name}' order by iteration"
    return [value for (value,) in rows(run / "replay.sqlite", query)]


def assert_acts_and_learns(run: Path, kind: str | None, *, rises: float = 0.30) -> None:
    """At least half of the episodes had their context rewritten, and held-out success rose."""
    success = metric(run, "eval/success")
    iterations = len(metric(run, "rollout/success"))
    # An iteration in which the strategy never acted has no share.
    acted = sum(metric(run, f"context/rewrites/{kind}")) / iterations if kind else 1.0
    print(f"{run.name}: acted in {acted:.0%}, {success[0]:.1%} -> {success[-1]:.1%} in {iterations} iterations")
    assert acted >= 0.5
    assert success[-1] - success[0] >= rises
