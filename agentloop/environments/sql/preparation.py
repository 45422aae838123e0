"""Tries, in a process that runs this file, whether a query can be prepared in bounded time and memory.

SQLite copies a common table expression wherever it is named: thirty that each name the one before twice are a billion
copies, made before the first instruction runs, and nothing can interrupt that.
"""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Mapping

_MAY_GROW = re.compile(r"\bwith\b", re.IGNORECASE)
_MEMORY_BYTES = 256 << 20
_SECONDS = 1
"""Seconds of the processor; those of the clock are more, for a busy machine may be slow to begin."""
_SECONDS_TO_BEGIN = 20.0
_TOO_MUCH = 9


def can_be_prepared(uri: str, query: str, limits: Mapping[int, int]) -> bool:
    """True for a query that is prepared within a second and 256 MiB; one that is wrong is, with an error."""
    if not _MAY_GROW.search(query):
        return True
    command = [sys.executable, "-I", "-S", __file__]
    asked = json.dumps({"uri": uri, "query": query, "limits": list(limits.items())})
    try:
        done = subprocess.run(
            command, input=asked.encode(), capture_output=True, timeout=_SECONDS_TO_BEGIN, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    if done.returncode not in (0, _TOO_MUCH) and done.returncode > 0:
        raise RuntimeError(f"{sys.executable} must run {__file__}, got {done.stderr.decode(errors='replace')[-300:]}")
    return done.returncode == 0


def _prepare() -> int:
    """Exit code of the process: it prepares the query and runs not one instruction of it."""
    asked = json.load(sys.stdin)
    _bound_itself()
    connection = sqlite3.connect(asked["uri"], uri=True)
    for limit, value in asked["limits"]:
        connection.setlimit(limit, value)
    connection.set_progress_handler(lambda: 1, 1)
    try:
        connection.execute(asked["query"])
    except MemoryError:
        return _TOO_MUCH
    except (sqlite3.Error, sqlite3.Warning, ValueError):
        pass  # interrupted, as it was to be; or wrong, which is found where it is run
    return 0


def _bound_itself() -> None:
    import resource

    for kind, most in ((resource.RLIMIT_AS, _MEMORY_BYTES), (resource.RLIMIT_CPU, _SECONDS), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (most, most))


if __name__ == "__main__":
    sys.exit(_prepare())
