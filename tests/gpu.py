"""`make gpu`: the tests that need a GPU. `make gpu PART=...` measures, as `python -m benchmarks gpu` does.

With VLLM_URL (and AGENTLOOP_ENGINE_KEY) the engine there has to pass the conformance suite, too.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
CONFORMANCE = "tests/agentloop/engines/test_engine_conformance.py"


def main() -> int:
    if not torch.cuda.is_available():
        print("make gpu must run on a machine with a CUDA device, got none. `make test` needs none.", file=sys.stderr)
        return 2
    failed = _pytest("-m", "gpu", "tests")
    if "VLLM_URL" in os.environ:
        failed |= _pytest(CONFORMANCE)
    return int(failed)


def _pytest(*words: str) -> bool:
    """Whether some test failed."""
    return subprocess.run([sys.executable, "-m", "pytest", "-v", *words], cwd=ROOT).returncode != 0


if __name__ == "__main__":
    sys.exit(main())
