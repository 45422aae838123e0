"""Writers of one file where each fsync takes longer, as on a laptop's disk: appends per second, and the longest wait.

The disk is made slow by strace, which holds up every fsync and fdatasync of the traced processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks import store_writers
from benchmarks._strace import traced

WRITERS = (1, 8)
SYNC_MS = 4
GOALS = {f"{figure}_{count}": "<= 0" for count in WRITERS for figure in ("lost", "errors", "torn")}


def measure(folder: Path) -> dict[str, float]:
    """Raises CalledProcessError where tracing is not allowed."""
    slow = ["-e", "trace=fsync,fdatasync", "-e", f"inject=fsync,fdatasync:delay_enter={SYNC_MS}ms"]
    found: dict[str, float] = {}
    for count in WRITERS:
        command = [sys.executable, "-m", "benchmarks.store_slow_disk", str(folder), str(count)]
        strace = ["strace", "-f", "--seccomp-bpf", *slow, "-o", str(folder / "trace"), *command]
        done = subprocess.run(strace, check=True, capture_output=True, text=True)
        found |= json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> dict[str, float]:
    print(f"writers of a file, every fsync {SYNC_MS} ms longer", flush=True)
    return traced(measure, GOALS)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(store_writers.measure(Path(sys.argv[1]), int(sys.argv[2]))))
    else:
        main()
