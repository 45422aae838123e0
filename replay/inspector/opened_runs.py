"""A folder of runs: what each of them has come to, and each one's inspector, opened when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import TypeVar

from starlette.types import ASGIApp

from replay import queries
from replay.errors import ReplayError
from replay.inspector.app import PAGES, with_pages
from replay.inspector.server.page_views import Pages
from replay.inspector.server.templating import environment
from replay.locate import DATABASE, own_folder, run_folders
from replay.queries import QueryResult
from replay.queries.open_buffer import OpenBuffer, open_buffer
from replay.queries.runs import LIVE, Series

Answer = TypeVar("Answer")
_WRITTEN = (DATABASE, f"{DATABASE}-wal", "metrics.jsonl", "run.json")
"""Files that change when there is something new to be known of a run."""
_Marks = tuple[tuple[int, int], ...]


class OpenedRuns:
    """Runs of a folder by the names of theirs. Looks anew at what was written since it looked last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lines: dict[str, tuple[_Marks, list[QueryResult]]] = {}
        self._curves: dict[tuple[str, str, int], tuple[_Marks, Series]] = {}
        self._apps: dict[str, ASGIApp] = {}
        self._opened = ExitStack()
        self._lock = Lock()

    def lines(self) -> list[QueryResult]:
        """Every run, those last written to first: its `folder` and what `queries.runs` and `queries.progress` say.

        `problem`: why nothing is known of it, of a buffer that can't be read; None of others.
        """
        return [line for folder in run_folders(self.folder) for line in self._lines_of(folder)]

    def _lines_of(self, folder: Path) -> list[QueryResult]:
        marks = _marks(folder)
        known = self._lines.get(folder.name)
        if known is not None and known[0] == marks and all(line["state"] != LIVE for line in known[1]):
            return known[1]
        try:
            found = _asked(folder, _lines)
        except ReplayError as error:
            found = [{"folder": folder.name, "run": None, "name": folder.name, "state": None, "problem": str(error)}]
        self._lines[folder.name] = marks, found
        return found

    def curves(self, line: Mapping[str, str], names: Sequence[str], merged: int) -> Series:
        """Metrics of one of the `lines`, `merged` iterations to a point."""
        folder, run = self.folder / line["folder"], line["run"]
        key, marks = (folder.name, run, merged), _marks(folder)
        known = self._curves.get(key)
        if known is None or known[0] != marks:
            series = _asked(folder, lambda buffer: queries.metric_series(buffer.store, run, names=names, merged=merged))
            known = self._curves[key] = marks, series
        return known[1]

    def app(self, name: str) -> ASGIApp | None:
        """The pages of the run in the folder of that name; None where there is none. Raises ReplayError."""
        with self._lock:
            if name not in self._apps and name in {folder.name for folder in run_folders(self.folder)}:
                source = self._opened.enter_context(open_buffer(str(self.folder / name)))
                store = source.store
                pages = Pages(source, environment(), place=store.url, naming_damage=store.naming_damage)
                self._apps[name] = with_pages(PAGES, pages)
            return self._apps.get(name)

    def close(self) -> None:
        self._opened.close()


def _asked(folder: Path, question: Callable[[OpenBuffer], Answer]) -> Answer:
    with open_buffer(str(folder)) as buffer:
        return question(buffer)


def _lines(buffer: OpenBuffer) -> list[QueryResult]:
    """The folder's own run; where it does not say which that is, all of its database."""
    assert buffer.folder is not None
    found = [row for row in queries.runs(buffer.store) if buffer.own_run in (None, row["id"])]
    lines = []
    for row in found:
        record = buffer.store.run(row["id"])
        progress = queries.progress(buffer.store, record, own_folder(buffer.folder, record.id))
        reached = {"state": progress["state"], "iteration": row["iterations"], "iterations": progress["iterations"]}
        line = {name: row[name] for name in ("name", "success", "trajectories", "code_version")}
        lines.append({"folder": buffer.folder.name, "run": record.id, **line, **reached, "problem": None})
    return lines


def _marks(folder: Path) -> _Marks:
    found = []
    for name in _WRITTEN:
        path = folder / name
        about = path.stat() if path.is_file() else None
        found.append((0, 0) if about is None else (about.st_mtime_ns, about.st_size))
    return tuple(found)
