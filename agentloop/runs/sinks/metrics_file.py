"""metrics.jsonl: a run's metrics as one file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path


class MetricsFile:
    """One JSON object per iteration in a file: `{"iteration": 3, "actor/entropy": 1.25, ...}`."""

    def __init__(self, path: Path, *, keep_through: int | None = None) -> None:
        """Goes on with `path`: its iterations up to `keep_through` (None: all) stay, a torn line goes."""
        _keep_whole_lines(path, keep_through)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  closed by close()

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        # JSON has no NaN or infinity; unknown is null, never 0.
        finite = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"iteration": iteration, **finite}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _keep_whole_lines(path: Path, keep_through: int | None) -> None:
    """Rewrite `path` beside itself, then rename: a crash here loses nothing. Untouched when all is well."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    kept = b"".join(line for line in content.splitlines(keepends=True) if _is_kept(line, keep_through))
    if kept == content:
        return
    beside = path.with_name(path.name + ".tmp")
    with open(beside, "wb") as file:
        file.write(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def _is_kept(line: bytes, keep_through: int | None) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        iteration = json.loads(line)["iteration"]
    except (ValueError, TypeError, KeyError):
        return False
    return isinstance(iteration, int) and (keep_through is None or iteration <= keep_through)
