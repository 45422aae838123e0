"""`make gpu`: the tests that need a GPU. `make gpu PART=...` measures, as `python -m benchmarks gpu` does."""

import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


def main() -> int:
    if not torch.cuda.is_available():
        print("make gpu must run on a machine with a CUDA device, got none. `make test` needs none.", file=sys.stderr)
        return 2
    return subprocess.run([sys.executable, "-m", "pytest", "-v", "-m", "gpu", "tests"], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
