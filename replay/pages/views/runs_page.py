"""The runs of a database, or of a folder, in one list: curves of those that are marked, and how they differ."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from replay.pages.addresses import BadQuery, address, text, texts
from replay.pages.charts import COLOURS, Config, PanelGroups, plain_groups
from replay.pages.opened_runs import OpenedRuns, run_lines
from replay.pages.page import Page
from replay.pages.panels import compared, panel_groups
from replay.pages.report import panel_series
from replay.questions import QueryResult, compare
from replay.questions.open_buffer import OpenBuffer
from replay.questions.runs import Metrics, merged_to

MOST = 2 * COLOURS
"""Runs in one chart: each colour once as a whole and once as a dashed line."""
_AT_FIRST = COLOURS
"""Runs that are shown where none is marked."""

Ask = Callable[[QueryResult, Hashable, Callable[[OpenBuffer], Any]], Any]
"""(line of a run, name of a question, question about its buffer): the answer."""


def of_database(source: OpenBuffer, request: Request) -> QueryResult | Response:
    """All runs of a database; where there is only one, its page is shown instead."""
    lines = run_lines(source)
    if len(lines) == 1 and text(request, "all") is None:
        return RedirectResponse(address("runs", lines[0]["run"]), 303)
    named = [{**line, "key": line["run"], "href": address("runs", line["run"])} for line in lines]
    return _shown(named, request, lambda line, key, question: question(source), place=source.store.url)


def of_folder(source: OpenedRuns, request: Request) -> QueryResult:
    named = [
        {**line, "key": f"{line['folder']}:{line['run']}", "href": address("in", line["folder"], "runs", line["run"])}
        for line in source.lines()
    ]
    return _shown(
        named, request, lambda line, key, asked: source.ask(line["folder"], key, asked), place=str(source.folder)
    )


def _shown(lines: list[QueryResult], request: Request, ask: Ask, *, place: str) -> QueryResult:
    marked = list(dict.fromkeys(texts(request, "show")))
    shown = _chosen(lines, marked)
    names = _names(shown)
    merged = merged_to(max((line["iteration"] for line in shown), default=1))

    def panels_of(line: QueryResult) -> PanelGroups:
        def curves(buffer: OpenBuffer, run: str = line["run"]) -> tuple[Metrics, Config]:
            return panel_series(buffer.store, run, merged), buffer.store.run(run).config

        return panel_groups(*ask(line, ("curves", line["run"], merged), curves))

    groups = compared({name: panels_of(line) for name, line in zip(names, shown, strict=True)})
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
    """Rows of the keys and numbers that differ between the runs, and how many numbers are the same in all."""

    def facts_of(line: QueryResult) -> Any:
        def facts(buffer: OpenBuffer, run: str = line["run"]) -> QueryResult:
            return compare.run_facts(buffer.store, run)

        return ask(line, ("facts", line["run"]), facts)

    facts = [*map(facts_of, shown)]
    found = {name: compare.side_by_side([each[name] for each in facts]) for name in ("config", "numbers")}
    different = {
        name: {key: [_text(value) for value in row] for key, row in rows.items() if any(v != row[0] for v in row)}
        for name, rows in found.items()
    }
    return {**different, "same_numbers": len(found["numbers"]) - len(different["numbers"])}


def _text(value: object) -> str:
    """A value with all digits of a whole number and six of others, so that what differs does not look alike."""
    if value is None:
        return "\u2013"
    if isinstance(value, str):
        return value
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


OF_DATABASE: Page[OpenBuffer] = Page("/", "runs.html", of_database, tab="runs")
OF_FOLDER: Page[OpenedRuns] = Page("/", "runs.html", of_folder, tab="runs")
