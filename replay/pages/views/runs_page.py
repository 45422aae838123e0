"""The runs of a database, or of a folder, whose buffers are kept open: one list, curves of those that are marked, and
how they differ."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp

from replay import questions
from replay.errors import ReplayError
from replay.locate import DATABASE, own_folder, run_folders
from replay.open_buffer import OpenBuffer, open_buffer
from replay.pages.addresses import BadQuery, address, text, texts
from replay.pages.page import Page
from replay.pages.panels import COLOURS, Config, compared, panel_groups, plain_groups
from replay.pages.report import panel_series
from replay.questions import QueryResult, compare
from replay.questions.runs import LIVE, Metrics, merged_to
from replay.store import ReplayStore

Answer = TypeVar("Answer")
_WRITTEN = (DATABASE, f"{DATABASE}-wal", "metrics.jsonl", "run.json")
"""Files that change when there is something new to be known of a run."""
_Marks = tuple[tuple[int, int], ...]
MOST = 2 * COLOURS
"""Runs in one chart: each colour once as a whole and once as a dashed line."""
_TASKS = 50
_AT_FIRST = COLOURS
"""Runs that are shown where none is marked."""

Ask = Callable[[QueryResult, str, Callable[[ReplayStore, str], Any]], Any]
"""(line of a run, name of a question, question about a store's run): the answer."""


def of_database(source: OpenBuffer, request: Request) -> QueryResult | Response:
    """All runs of a database; where there is only one, its page is shown instead."""
    lines = run_lines(source)
    if len(lines) == 1 and text(request, "all") is None:
        return RedirectResponse(address("runs", lines[0]["run"]), 303)
    named = [{**line, "key": line["run"], "href": address("runs", line["run"])} for line in lines]
    return _shown(named, request, lambda line, _, asked: asked(source.store, line["run"]), place=source.store.url)


def of_folder(source: OpenedRuns, request: Request) -> QueryResult:
    named = [
        {**line, "key": f"{line['folder']}:{line['run']}", "href": address("in", line["folder"], "runs", line["run"])}
        for line in source.lines()
    ]

    def ask(line: QueryResult, name: str, asked: Callable[[ReplayStore, str], Any]) -> Any:
        run = line["run"]
        return source.ask(line["folder"], (name, run), lambda buffer: asked(buffer.store, run))

    return _shown(named, request, ask, place=str(source.folder))


def _shown(lines: list[QueryResult], request: Request, ask: Ask, *, place: str) -> QueryResult:
    marked = list(dict.fromkeys(texts(request, "show")))
    shown = _chosen(lines, marked)
    names = _names(shown)
    merged = merged_to(max((line["iteration"] for line in shown), default=1))

    def curves(store: ReplayStore, run: str) -> tuple[Metrics, Config]:
        return panel_series(store, run, merged), store.run(run).config

    series = (ask(line, f"curves of {merged}", curves) for line in shown)
    groups = compared({name: panel_groups(*each) for name, each in zip(names, series, strict=True)})
    return {
        "runs": lines,
        "folder": place,
        "in_folders": any("folder" in line for line in lines),
        "most": MOST,
        "merged": merged,
        **plain_groups(groups, merged=merged),
        "looks": {line["key"]: (f"s{at % COLOURS}", at >= COLOURS) for at, line in enumerate(shown)},
        "names": names,
        "differences": _differences(shown, ask) if len(marked) > 1 else None,
    }


def _chosen(lines: Sequence[QueryResult], marked: Sequence[str]) -> list[QueryResult]:
    if len(marked) > MOST:
        raise BadQuery(f"show must be given at most {MOST} times, got {len(marked)}. Mark fewer runs.")
    known = {line["key"]: line for line in lines if line["problem"] is None}
    unknown = [key for key in marked if key not in known]
    if unknown:
        raise BadQuery(f"show must name runs of the list, got {unknown[0]!r}. Mark them there.")
    trained = [line for line in known.values() if line["iteration"]]
    return [known[key] for key in marked] or trained[:_AT_FIRST]


def _names(lines: Sequence[QueryResult]) -> list[str]:
    """The shortest name that no other has: of the run or its folder, or else both of them."""
    short = [str(line.get("folder", line["name"])) for line in lines]
    times = Counter(short)
    return [
        name if times[name] == 1 else f"{name} {line['name'] if 'folder' in line else line['run']}"
        for name, line in zip(short, lines, strict=True)
    ]


def _differences(shown: Sequence[QueryResult], ask: Ask) -> QueryResult:
    """Rows of the keys and numbers that differ between the runs, how many are the same in all, and their tasks."""
    facts = [ask(line, "facts", compare.run_facts) for line in shown]
    tasks = [ask(line, "tasks", questions.task_success) for line in shown]
    found = {name: compare.side_by_side([each[name] for each in facts]) for name in ("config", "numbers")}
    different = {
        name: {key: [_text(value) for value in row] for key, row in rows.items() if any(v != row[0] for v in row)}
        for name, rows in found.items()
    }
    same = len(found["numbers"]) - len(different["numbers"])
    return {**different, "same_numbers": same, "tasks": compare.task_success(tasks, _TASKS)}


def _text(value: object) -> str:
    """A value with all digits of a whole number and six of others, so that what differs does not look alike."""
    if value is None:
        return "\u2013"
    if isinstance(value, str):
        return value
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def run_lines(buffer: OpenBuffer, run: str | None = None) -> list[QueryResult]:
    """A line for each run of a buffer, or for one: what `questions.runs` and `questions.progress` say of it."""
    lines = []
    for row in questions.runs(buffer.store):
        if run in (None, row["id"]):
            record = buffer.store.run(row["id"])
            progress = questions.progress(buffer.store, record, own_folder(buffer.folder, record.id))
            made = max(row["iterations"], progress["iteration"])  # an update of sft is in the metrics alone
            reached = {"state": progress["state"], "iteration": made, "of": progress["iterations"]}
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
        """Every run, the last written to first: its `folder`, its line, or the `problem` of an unreadable buffer."""
        return [
            {"folder": folder.name, **line} for folder in run_folders(self.folder) for line in self._lines_of(folder)
        ]

    def _lines_of(self, folder: Path) -> list[QueryResult]:
        try:
            found: list[QueryResult] = self.ask(folder.name, "lines", lambda each: run_lines(each, each.own_run))
            if any(line["state"] == LIVE for line in found):  # time alone makes a run stop
                self._answers.pop((folder.name, "lines"), None)
        except ReplayError as error:
            return [{"run": None, "name": folder.name, "state": None, "problem": str(error)}]
        return found

    def ask(self, folder: str, key: Hashable, question: Callable[[OpenBuffer], Answer]) -> Answer:
        """The answer of the run in that folder; of the same `key` it is remembered until the run writes again."""
        files = (self.folder / folder / name for name in _WRITTEN)
        marks = tuple((about.st_mtime_ns, about.st_size) for about in (file.stat() for file in files if file.is_file()))
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


OF_DATABASE: Page[OpenBuffer] = Page("/", "runs.html", of_database, tab="runs")
OF_FOLDER: Page[OpenedRuns] = Page("/", "runs.html", of_folder, tab="runs")
