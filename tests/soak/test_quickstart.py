"""The quickstart learns, on every seed, through the front door."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agentloop.runs import ROOT, rows

pytestmark = pytest.mark.soak

SEEDS = 5


def quickstart(folder: Path, *settings: str) -> dict[str, object]:
    """The command people type; its closing figures."""
    sets = [part for setting in (f"run.folder={folder}", *settings) for part in ("--set", setting)]
    command = [Path(sys.executable).with_name("agentloop"), "train", "configs/quickstart.yaml", "--json", *sets]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def evaluations(run: Path) -> list[float]:
    query = "select value from metrics where name = 'eval/success' order by iteration"
    return [value for (value,) in rows(run / "replay.sqlite", query)]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_quickstart_reaches_ninety_percent_twice_in_a_row(seed: int, tmp_path: Path) -> None:
    result = quickstart(tmp_path, f"run.seed={seed}")
    success = evaluations(Path(str(result["folder"])))
    print(f"seed {seed}: {success[0]:.1%} -> {success[-2]:.1%}, {success[-1]:.1%} in {result['iterations']} iterations")
    assert success[0] <= 0.35
    assert min(success[-2:]) >= 0.90
