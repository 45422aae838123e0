"""What benchmarks that watch or hold up system calls share."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks._goals import show


def traced(measure: Callable[[Path], dict[str, float]], goals: Mapping[str, str]) -> dict[str, float]:
    """What `measure` finds by strace in a folder of its own, shown; nothing where tracing is not possible."""
    if shutil.which("strace") is None:
        print("  left out: it needs strace, for instance from apt install strace")
        return {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = measure(Path(folder))
        except subprocess.CalledProcessError as error:
            print(f"  left out: strace ended with {error.returncode}: {error.stderr.strip()[-200:]}")
            return {}
    show(found, goals)
    return found
