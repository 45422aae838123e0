"""Commands as people type them, in a process of their own, with their CPU-seconds."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def typed(*words: object, folder: Path) -> tuple[str, float]:
    """What `python -m ...` printed last, and its CPU-seconds."""
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    command, before = [sys.executable, "-m", *map(str, words)], children_cpu()
    done = subprocess.run(command, cwd=folder, env={**os.environ, **quiet}, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} must end well, got {done.returncode}:\n{done.stderr[-2000:]}")
    return (done.stdout.splitlines() or [""])[-1], children_cpu() - before


def run(
    command: str, config: str, settings: Mapping[str, object], *, folder: Path = ROOT
) -> tuple[dict[str, Any], float]:
    """`agentloop train` or `sft`: its result, and the CPU-seconds of the whole command, evaluations included."""
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value, default=str)}")]
    printed, cpu = typed("agentloop", command, config, "--json", *sets, folder=folder)
    return json.loads(printed), cpu


def warmed_up(config: str, settings: Mapping[str, object]) -> Path:
    """The model that a run begins with; made by a run of one iteration."""
    result, _ = run("train", config, {**settings, "run.iterations": 1, "evaluation.tasks": 1})
    return Path(result["folder"]) / "start"


def read(path: Path) -> list[dict[str, Any]]:
    """Results that runs have left, a line each."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def commit() -> str:
    """Of the code that a result is made with."""
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
