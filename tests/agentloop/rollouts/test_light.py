"""What runs episodes is light: there may be many such processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

_IMPORTS = """
import importlib, sys
from pathlib import Path
for name in sys.argv[1:]: importlib.import_module(name)
assert not {"torch", "transformers"} & sys.modules.keys()
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(int(peak.split()[1]) // 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say how much memory a process took")
@pytest.mark.parametrize(
    "names",
    [
        ("agentloop.rollouts.collect", "agentloop.rollouts.evaluation", "context", "replay"),
        ("agentloop.cli.main", "agentloop.cli.cluster_commands"),
    ],
    ids=["episodes", "a worker"],
)
def test_what_runs_episodes_takes_120_megabytes_and_no_torch(names: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", _IMPORTS, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) <= 120
