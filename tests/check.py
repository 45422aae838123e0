"""What `make test` checks: style, types, layers and the quick tests; with `--slow` what `make test-slow` does.

Tests run on two cores, a file on one of them, the longest first, while the other checks run.
"""

import argparse
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
    *(sys.executable, "-m", "pytest", "--durations=10", "-rs"),
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
        [str(part) for part in command], cwd=ROOT, env=environment, capture_output=not stream, text=True
    )
    output = "" if stream else done.stdout + done.stderr
    return Outcome(name, done.returncode == 0, time.monotonic() - began, output)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.check", description=__doc__)
    parser.add_argument("--slow", action="store_true", help="the slow tests, and no other check")
    slow: bool = parser.parse_args().slow
    checks = {} if slow else QUICK
    chosen = "slow and not soak" if slow else "not slow and not soak"
    with ThreadPoolExecutor(max_workers=1) as pool:
        waiting: list[Future[Outcome]] = [pool.submit(run, name, command) for name, command in checks.items()]
        tests = run("tests", [*PYTEST, "-m", chosen], stream=True)
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
