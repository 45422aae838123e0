"""PPO with a critic learns the quickstart's task, through the front door."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.runs import ROOT, rows

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("seed", range(3))
def test_ppo_raises_held_out_success_by_sixty_points(seed: int, tmp_path: Path) -> None:
    sets = ["--set", f"run.folder={tmp_path}", "--set", f"run.seed={seed}"]
    command = [Path(sys.executable).with_name("agentloop"), "train", "configs/ppo.yaml", "--json", *sets]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    run = Path(json.loads(done.stdout.splitlines()[-1])["folder"])

    def metric(name: str) -> list[float]:
        query = f"select value from metrics where name = '{name}' order by iteration"
        return [value for (value,) in rows(run / "replay.sqlite", query)]

    success, explained = metric("eval/success"), metric("critic/explained_variance")
    print(f"seed {seed}: {[f'{share:.1%}' for share in success]}, explained variance {explained[-1]:.2f}")
    assert success[-1] - success[0] >= 0.60
