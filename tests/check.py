"""Everything `make test` checks, with one summary: style, types, layers, tests.

Tests run on two cores, a file on one of them, the longest first; the quick checks run beside them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
QUICK = {
    "style": [BIN / "ruff", "check", "."],
    "format": [BIN / "ruff", "format", "--check", "."],
    "types": [BIN / "mypy"],
    "layers": [BIN / "lint-imports", "--no-cache"],
}
PYTEST = [
    *(sys.executable, "-m", "pytest", "--durations=10"),
    *("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"),
    "--max-worker-restart=0",  # what a dead worker had left to do is given to nobody, and would be waited for
]


@dataclass(frozen=True)
class Outcome:
    name: str
    passed: bool
    seconds: float
    output: str


def run(name: str, command: list[str | Path], *, stream: bool = False) -> Outcome:
    """One check; its output is kept unless it is streamed."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",  # equal bits are promised on a CPU; `make gpu` has the tests of a GPU
    }
    began = time.monotonic()
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=environment,
        capture_output=not stream,
        text=True,
        check=False,
    )
    output = "" if stream else done.stdout + done.stderr
    return Outcome(name, done.returncode == 0, time.monotonic() - began, output)


def main() -> int:
    with ThreadPoolExecutor(max_workers=1) as pool:
        waiting: list[Future[Outcome]] = [pool.submit(run, name, command) for name, command in QUICK.items()]
        tests = run("tests", list(PYTEST), stream=True)
        outcomes = [*(future.result() for future in waiting), tests]
    for outcome in outcomes:
        if not outcome.passed:
            print(f"\n--- {outcome.name} ---\n{outcome.output}")
    print("\nsummary")
    for outcome in outcomes:
        print(f"  {outcome.name:<7} {'passed' if outcome.passed else 'FAILED'}  {outcome.seconds:5.0f} s")
    failed = sum(not outcome.passed for outcome in outcomes)
    print(f"checks: {len(outcomes) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
