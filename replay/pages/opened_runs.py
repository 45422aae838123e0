"""A folder of runs: what each of them has come to, and each one's pages, opened when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from starlette.types import ASGIApp

from replay import questions
from replay.errors import ReplayError
from replay.locate import DATABASE, own_folder, run_folders
from replay.questions import QueryResult
from replay.questions.open_buffer import OpenBuffer, open_buffer
from replay.questions.runs import LIVE

Answer = TypeVar("Answer")
_WRITTEN = (DATABASE, f"{DATABASE}-wal", "metrics.jsonl", "run.json")
"""Files that change when there is something new to be known of a run."""
_Marks = tuple[tuple[int, int], ...]


def run_lines(buffer: OpenBuffer, run: str | None = None) -> list[QueryResult]:
    """A line for each run of a buffer, or for one: what `questions.runs` and `questions.progress` say of it."""
    lines = []
    for row in questions.runs(buffer.store):
        if run in (None, row["id"]):
            record = buffer.store.run(row["id"])
            progress = questions.progress(buffer.store, record, own_folder(buffer.folder, record.id))
            reached = {"state": progress["state"], "iteration": row["iterations"], "of": progress["iterations"]}
            known = {name: row[name] for name in ("name", "success", "trajectories", "code_version")}
            lines.append({"run": record.id, **known, **reached, "problem": None})
    return lines


class OpenedRuns:
    """Runs of a folder by the names of their folders. A run is asked again when its files have changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._answers: dict[Hashable, tuple[_Marks, Any]] = {}
        self._apps: dict[str, ASGIApp] = {}
        self._opened = ExitStack()
        self._lock = Lock()

    def lines(self) -> list[QueryResult]:
        """Every run, those last written to first: its `folder`, and its line.

        `problem`: why nothing is known of a buffer that can't be read; None for others.
        """
        return [
            {"folder": folder.name, **line} for folder in run_folders(self.folder) for line in self._lines_of(folder)
        ]

    def _lines_of(self, folder: Path) -> list[QueryResult]:
        def own_lines(buffer: OpenBuffer) -> list[QueryResult]:
            return run_lines(buffer, buffer.own_run)

        try:
            found: list[QueryResult] = self.ask(folder.name, "lines", own_lines)
            if any(line["state"] == LIVE for line in found):  # time alone makes a run stop
                self._answers.pop((folder.name, "lines"), None)
        except ReplayError as error:
            return [{"run": None, "name": folder.name, "state": None, "problem": str(error)}]
        return found

    def ask(self, folder: str, key: Hashable, question: Callable[[OpenBuffer], Answer]) -> Answer:
        """The answer of the run in that folder; of the same `key` it is remembered until the run writes again."""
        marks = _marks(self.folder / folder)
        known = self._answers.get((folder, key))
        if known is None or known[0] != marks:
            with open_buffer(str(self.folder / folder)) as buffer:
                known = self._answers[folder, key] = marks, question(buffer)
        answer: Answer = known[1]
        return answer

    def app(self, name: str, made: Callable[[OpenBuffer], ASGIApp]) -> ASGIApp | None:
        """The pages of the run in the folder of that name; None where there is none. Raises ReplayError."""
        with self._lock:
            if name not in self._apps and name in {folder.name for folder in run_folders(self.folder)}:
                self._apps[name] = made(self._opened.enter_context(open_buffer(str(self.folder / name))))
            return self._apps.get(name)

    def close(self) -> None:
        self._opened.close()


def _marks(folder: Path) -> _Marks:
    found = [path.stat() for name in _WRITTEN if (path := folder / name).is_file()]
    return tuple((about.st_mtime_ns, about.st_size) for about in found)
