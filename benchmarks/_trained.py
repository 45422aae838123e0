"""`agentloop train` as people type it, in a process of its own, and what its run's buffer says afterwards."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def trained(config: str, settings: Mapping[str, object], *, checkout: Path = ROOT) -> tuple[Path, float]:
    """The run's folder, and the CPU-seconds of the whole command, evaluations included."""
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    command = [sys.executable, "-m", "agentloop", "train", config, "--json", *sets]
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(checkout)}
    before = _children_cpu()
    done = subprocess.run(command, cwd=checkout, env={**os.environ, **quiet}, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{checkout} must train {config}, got exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return Path(json.loads(done.stdout.splitlines()[-1])["folder"]), _children_cpu() - before


def warmed_up(config: str, settings: Mapping[str, object]) -> Path:
    """The model that a run begins with; made by a run of one iteration."""
    folder, _ = trained(config, {**settings, "run.iterations": 1, "evaluation.tasks": 1})
    return folder / "start"


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
