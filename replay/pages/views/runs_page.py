"""The page of all runs of a database or a folder: their list, the curves of marked runs, and their differences."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp

from replay import questions
from replay.errors import ReplayError
from replay.locate import DATABASE, own_folder, run_folders
from replay.open_buffer import OpenBuffer, open_buffer
from replay.pages.addresses import BadQuery, address, read_choice, read_number, read_parameter, read_parameters
from replay.pages.page import Page
from replay.pages.panels import COLOURS, compare_runs, metric_panels, panel_groups, plain_groups
from replay.pages.report import panel_series
from replay.questions import QueryResult
from replay.questions.runs import AMOUNTS, LIVE, STOPS, merged_to, spent
from replay.questions.tasks import task_prompts
from replay.store import ReplayStore

Answer = TypeVar("Answer")
_WRITTEN = (DATABASE, f"{DATABASE}-wal", "metrics.jsonl", "run.json")
"""Files that change whenever a run has news."""
_Marks = tuple[tuple[int, int], ...]
MOST = 2 * COLOURS
"""Most runs in one chart. Each colour is used for a solid and a dashed line."""
_TASKS = 20
_TASK_MEANS = ("first_success", "latest_success", "best_success")
_NOT_SETTINGS = {"run.seed", "run.name", "run.folder"}
_RECENT = 16
"""Newest iterations whose metrics are offered by name."""
_MOST_SMOOTHED = 1000
_AT_FIRST = COLOURS
"""Number of runs that are shown if none is marked."""

Ask = Callable[[QueryResult, str, Callable[[ReplayStore, str], Any]], Any]
"""A function (line of a run, name of a question, question about a store and a run) that returns the answer."""


def list_runs(source: OpenBuffer | OpenedRuns, request: Request) -> QueryResult | Response:
    """Show all runs of a database or a folder. If a database has only one, its page is shown instead."""
    lines, ask = _runs_of(source)
    if isinstance(source, OpenBuffer) and len(lines) == 1 and read_parameter(request, "all") is None:
        return RedirectResponse(address("runs", lines[0]["run"]), 303)
    place = source.store.url if isinstance(source, OpenBuffer) else str(source.folder)
    return _shown(lines, ask, request, place=place)


def _runs_of(source: OpenBuffer | OpenedRuns) -> tuple[list[QueryResult], Ask]:
    if isinstance(source, OpenBuffer):
        lines = [{**line, "key": line["run"], "href": address("runs", line["run"])} for line in run_lines(source)]
        return lines, lambda line, _, asked: asked(source.store, line["run"])
    lines = [
        {**line, "key": f"{line['folder']}:{line['run']}", "href": address("in", line["folder"], "runs", line["run"])}
        for line in source.lines()
    ]

    def ask(line: QueryResult, name: str, asked: Callable[[ReplayStore, str], Any]) -> Any:
        run = line["run"]
        return source.ask(line["folder"], (name, run), lambda buffer: asked(buffer.store, run))

    return lines, ask


def _shown(lines: list[QueryResult], ask: Ask, request: Request, *, place: str) -> QueryResult:
    marked = list(dict.fromkeys(read_parameters(request, "show")))
    own, over = list(dict.fromkeys(read_parameters(request, "metric"))), read_choice(request, "over", AMOUNTS)
    shown = _chosen(lines, marked)
    names = _shortest_names(shown)
    newest = max((line["iteration"] for line in shown), default=1)
    merged = merged_to(newest)

    def curves(store: ReplayStore, run: str) -> QueryResult:
        config = store.run(run).config
        return {
            "named": questions.metric_series(store, run, names=own, families=(STOPS,), merged=merged),
            "groups": panel_groups(panel_series(store, run, merged), config),
            "config": _flat(dict(config)),
            "logged": list(questions.metric_series(store, run, within=range(newest - _RECENT, newest + 1))),
            "spent": None if over == AMOUNTS[0] else spent(store, run, over),
        }

    found = [ask(line, f"curves {[merged, over, own]}", curves) for line in shown]
    apart, asked = read_parameter(request, "seeds") == "apart", set(read_parameters(request, "one"))
    as_one = [line["key"] for line in lines if asked & {line["key"], line["run"]}]
    marks = ["one" if line["key"] in as_one else line["key"] if apart else None for line in shown]
    places = _places(marks, [each["config"] for each in found])
    known = {name for each in found for name in each["named"]}
    panels = [{**metric_panels(each["named"], own, known), **each["groups"]} for each in found]
    groups = compare_runs(dict(zip(names, panels, strict=True)), places)
    return {
        "runs": lines,
        "folder": place,
        "in_folders": any("folder" in line for line in lines),
        "most": MOST,
        "merged": merged,
        **plain_groups(groups, merged=merged),
        "looks": {line["key"]: (f"s{at % COLOURS}", at >= COLOURS) for at, line in zip(places, shown, strict=True)},
        "asked": {"one": as_one, "over": over, "apart": apart, "metrics": own},
        "reading": {
            "over": over,
            "as_one": [name for name, mark in zip(names, marks, strict=True) if mark == "one"],
            "smooth": read_number(request, "smooth", 1, least=1, most=_MOST_SMOOTHED),
            "spent": {name: each["spent"] for name, each in zip(names, found, strict=True)},
        },
        "amounts": AMOUNTS,
        "logged": sorted({name for each in found for name in each["logged"]}),
        "names": names,
        "parts": [address(part, show=marked) for part in ("compared-tasks", "differences")] if len(marked) > 1 else [],
    }


def _places(marks: Sequence[str | None], configs: Sequence[QueryResult]) -> list[int]:
    """Return the number of each run's curve. Runs of one mark share one; without a mark, seeds of one setting do."""
    settings = (json.dumps({name: each[name] for name in sorted(each.keys() - _NOT_SETTINGS)}) for each in configs)
    known = zip(marks, settings, configs, strict=True)
    keys = [mark or (setting if "run.seed" in config else at) for at, (mark, setting, config) in enumerate(known)]
    order = list(dict.fromkeys(keys))
    return [order.index(key) for key in keys]


def _chosen(lines: Sequence[QueryResult], marked: Sequence[str]) -> list[QueryResult]:
    """Return the `marked` lines, or else the first. A mark is a key, or the id of a run, of which the newest counts."""
    if len(marked) > MOST:
        raise BadQuery(f"show must be given at most {MOST} times, got {len(marked)}. Mark fewer runs.")
    readable = [line for line in lines if line["problem"] is None]
    known = {line[name]: line for name in ("run", "key") for line in reversed(readable)}
    unknown = [key for key in marked if key not in known]
    if unknown:
        raise BadQuery(f"show must name runs of the list, got {unknown[0]!r}. Mark them there.")
    trained = [line for line in readable if line["iteration"]]
    return list({known[key]["key"]: known[key] for key in marked}.values()) or trained[:_AT_FIRST]


def _shortest_names(lines: Sequence[QueryResult]) -> list[str]:
    """Return a different name for each run: the name of its folder or run, or both if several share the first."""
    short = [str(line.get("folder", line["name"])) for line in lines]
    times = Counter(short)
    return [
        name if times[name] == 1 else f"{name} {line['name'] if 'folder' in line else line['run']}"
        for name, line in zip(short, lines, strict=True)
    ]


def compare_marked_runs(source: OpenBuffer | OpenedRuns, request: Request) -> QueryResult:
    """Return the configuration keys and numbers that differ between runs, and how many numbers are equal."""
    shown, ask = _marked_runs(source, request)
    facts = [ask(line, "facts", _run_facts) for line in shown]
    found = {name: _side_by_side([each[name] for each in facts]) for name in ("config", "numbers")}
    different = {
        name: {key: [_text(value, mark) for value in row] for key, row in rows.items() if any(v != row[0] for v in row)}
        for (name, rows), mark in zip(found.items(), ("", ","), strict=True)
    }
    same = len(found["numbers"]) - len(different["numbers"])
    return {**different, "names": _shortest_names(shown), "same_numbers": same}


def compare_tasks_of_marked_runs(source: OpenBuffer | OpenedRuns, request: Request) -> QueryResult:
    shown, ask = _marked_runs(source, request)
    return {"names": _shortest_names(shown), "tasks": _compare_tasks(shown, ask)}


def _marked_runs(source: OpenBuffer | OpenedRuns, request: Request) -> tuple[list[QueryResult], Ask]:
    lines, ask = _runs_of(source)
    return _chosen(lines, list(dict.fromkeys(read_parameters(request, "show")))), ask


def _run_facts(store: ReplayStore, run: str) -> dict[str, QueryResult]:
    """Return the `numbers` of a run's summary and its `config`, both with flattened keys."""
    numbers = _flat(questions.summary(store, run))
    del numbers["database"]
    return {"numbers": numbers, "config": _flat(dict(store.run(run).config))}


def _compare_tasks(shown: Sequence[QueryResult], ask: Ask) -> QueryResult:
    """Compare the success of the tasks that at least two runs tried.

    `tasks` counts them. `rows` has the first `_TASKS` of them, with a prompt, an address, and one entry a run (None:
    not tried). Tasks whose latest success differs most come first. `means` has each run's means over the `shared`
    tasks, which all runs tried.
    """
    rows = _side_by_side([ask(line, "tasks", questions.task_success) for line in shown])
    latest = {hash: [one["latest_success"] for one in row if one] for hash, row in rows.items()}
    several = sorted(
        (hash for hash in rows if len(latest[hash]) > 1),
        key=lambda hash: (min(latest[hash]) - max(latest[hash]), hash),
    )
    shared, listed = [rows[hash] for hash in several if all(rows[hash])], several[:_TASKS]
    prompts = [ask(line, f"prompts {listed}", partial(task_prompts, hashes=listed)) for line in shown]
    tasks = []
    for hash in listed:
        line, prompt = next(
            (line, each[hash]) for line, each, one in zip(shown, prompts, rows[hash], strict=True) if one
        )
        place = ("in", line["folder"]) if "folder" in line else ()
        href = address(*place, "tasks", hash, run=line["run"])
        tasks.append({"hash": hash, "prompt": prompt, "href": href, "runs": rows[hash]})
    means = [
        {name: fmean(row[at][name] for row in shared) for name in _TASK_MEANS if shared} for at in range(len(shown))
    ]
    return {"tasks": len(several), "shared": len(shared), "means": means, "rows": tasks}


def _side_by_side(each: Sequence[QueryResult]) -> dict[str, list[Any]]:
    """Return the values of each name, one for each answer. None: the answer lacks the name."""
    return {name: [values.get(name) for values in each] for name in dict.fromkeys(name for one in each for name in one)}


def _flat(answer: QueryResult, prefix: str = "") -> QueryResult:
    flat: QueryResult = {}
    for name, value in answer.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _text(value: object, mark: str) -> str:
    """Write a value: whole numbers in full and others with six digits, with the `mark` between thousands."""
    if value is None:
        return "\u2013"
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:{mark}.6g}" if isinstance(value, float) else f"{value:{mark}}"
    return json.dumps(value, ensure_ascii=False)


def run_lines(buffer: OpenBuffer, run: str | None = None) -> list[QueryResult]:
    """Return a line for each run of a buffer (or for one run) from `questions.runs` and `questions.progress`."""
    lines = []
    for row in questions.runs(buffer.store):
        if run in (None, row["id"]):
            record = buffer.store.run(row["id"])
            progress = questions.progress(buffer.store, record, own_folder(buffer.folder, record.id))
            made = max(row["iterations"], progress["iteration"])  # only metrics count the updates of sft
            reached = {"state": progress["state"], "iteration": made, "of": progress["iterations"]}
            known = {name: row[name] for name in ("name", "success", "evaluated", "trajectories", "code_version")}
            lines.append({"run": record.id, **known, **reached, "problem": None})
    return lines


class OpenedRuns:
    """The runs of a folder. Answers about a run are kept until the run's files change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._answers: dict[Hashable, tuple[_Marks, Any]] = {}
        self._apps: dict[str, ASGIApp] = {}
        self._opened = ExitStack()
        self._lock = Lock()

    def lines(self) -> list[QueryResult]:
        """Return a line for every run with its `folder`, the newest first. An unreadable buffer has a `problem`."""
        return [
            {"folder": folder.name, **line} for folder in run_folders(self.folder) for line in self._lines_of(folder)
        ]

    def _lines_of(self, folder: Path) -> list[QueryResult]:
        try:
            found: list[QueryResult] = self.ask(folder.name, "lines", lambda each: run_lines(each, each.own_run))
            if any(line["state"] == LIVE for line in found):  # a live run may stop without writing
                self._answers.pop((folder.name, "lines"), None)
        except ReplayError as error:
            return [{"run": None, "name": folder.name, "state": None, "problem": str(error)}]
        return found

    def ask(self, folder: str, key: Hashable, question: Callable[[OpenBuffer], Answer]) -> Answer:
        """Ask the run in a folder. The answer is kept under `key` until the run writes again."""
        files = (self.folder / folder / name for name in _WRITTEN)
        marks = tuple((about.st_mtime_ns, about.st_size) for about in (file.stat() for file in files if file.is_file()))
        known = self._answers.get((folder, key))
        if known is None or known[0] != marks:
            with open_buffer(str(self.folder / folder)) as buffer:
                known = self._answers[folder, key] = marks, question(buffer)
        answer: Answer = known[1]
        return answer

    def app(self, name: str, made: Callable[[OpenBuffer], ASGIApp]) -> ASGIApp | None:
        """Return the pages of the run in the folder with this name. None: there is no such run. Raises ReplayError."""
        with self._lock:
            if name not in self._apps and name in {folder.name for folder in run_folders(self.folder)}:
                self._apps[name] = made(self._opened.enter_context(open_buffer(str(self.folder / name))))
            return self._apps.get(name)

    def close(self) -> None:
        self._opened.close()


PAGE: Page[Any] = Page("/", "runs.html", list_runs, tab="runs")
DIFFERENCES: Page[Any] = Page("/differences", "differences.html", compare_marked_runs, tab="runs")
TASKS: Page[Any] = Page("/compared-tasks", "compared_tasks.html", compare_tasks_of_marked_runs, tab="runs")
