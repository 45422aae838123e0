"""`make gpu`: what only a machine with a GPU can show: its tests, and its figures, which go into docs/benchmarks.md.

With VLLM_URL (and AGENTLOOP_ENGINE_KEY) the engine there has to pass the conformance suite, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks._goals import verdict
from benchmarks.log_probs import GOALS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- what make gpu measured -->", "<!-- the end of it -->"
CONFORMANCE = "tests/agentloop/generation/test_engine_conformance.py"


def main() -> int:
    if not torch.cuda.is_available():
        print("make gpu must run on a machine with a CUDA device, got none. `make test` needs none.", file=sys.stderr)
        return 2
    failed = _pytest("-m", "gpu", "tests")
    if "VLLM_URL" in os.environ:
        failed |= _pytest(CONFORMANCE)
    command = [sys.executable, "-m", "benchmarks", "log_probs", "--json"]
    measured = json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)
    PAGE.write_text(with_figures(PAGE.read_text(), measured["environment"], measured["benchmarks"]["log_probs"]))
    print(f"the figures are in {PAGE.relative_to(ROOT)}")
    return int(failed)


def _pytest(*words: str) -> bool:
    """Whether some test failed."""
    return subprocess.run([sys.executable, "-m", "pytest", "-v", *words], cwd=ROOT, check=False).returncode != 0


def with_figures(page: str, environment: Mapping[str, str], figures: Mapping[str, float]) -> str:
    """The page with these figures in the place of earlier ones."""
    before, begin, rest = page.partition(BEGIN)
    _, end, behind = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE.name} must hold {BEGIN!r} and {END!r}, got a page without them.")
    rows = [f"| `{name}` | {value:,.3g} | {verdict(name, value, GOALS)} |" for name, value in figures.items()]
    lines = [
        f"Measured on {environment['date']} by `make gpu` on {environment['gpu']} ({environment['hardware']}; torch "
        f"{environment['torch']}).",
        "",
        "| figure | measured | |",
        "|---|---|---|",
        *rows,
    ]
    return f"{before}{BEGIN}\n{chr(10).join(lines)}\n{END}{behind}"


if __name__ == "__main__":
    sys.exit(main())
