"""What runs episodes is light: there may be many such processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

_IMPORTS = """
import sys
from pathlib import Path
import agentloop.rollouts.collect, agentloop.rollouts.evaluation, context, replay
assert not {"torch", "transformers"} & sys.modules.keys()
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(int(peak.split()[1]) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say how much memory a process took")
def test_what_runs_episodes_takes_120_megabytes_and_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) <= 120
