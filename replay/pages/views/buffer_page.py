"""The pages about a buffer's rows: their list and distributions, the tasks, and failures beside successes."""

import json
from functools import partial

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from replay import questions
from replay.open_buffer import OpenBuffer
from replay.pages.addresses import address, read_choice, read_number, read_parameter, read_parameters, read_path_part
from replay.pages.commands import list_command
from replay.pages.page import Page, run_of
from replay.pages.panels import COLOURS, Axis, Curve, Panel, plain_groups
from replay.questions import Query, QueryResult, Sort, TaskSort
from replay.questions.filters import WrongFilter, conditions
from replay.questions.outcomes import outcomes
from replay.questions.outliers import outliers
from replay.questions.slices import slices, unsolved_held_out

_ROWS = 50
_TASKS = 100
_KEPT = ("run", "sort", "order", "limit")
_GROUPS = 40
"""Most groups of a task that are shown."""
_MOST_RUNS = 6
_SHORT_FIELDS = {"text": "{!r} in text", "tool": "tool == {!r}", "task": "task.startswith({!r})"}
"""Fields of the form that become filters of the address, so that each list has one address."""


def listing(source: OpenBuffer, request: Request) -> QueryResult | Response:
    """Show a page of rows. Filters that can't be read are left out, and shown beside their field with the error.

    A search in messages goes on in parts: `found` and `searched` count what the parts before had.
    """
    kept, asked_for = _kept(request), read_parameters(request, "where")
    short = [form.format(given) for name, form in _SHORT_FIELDS.items() if (given := read_parameter(request, name))]
    if short:
        return RedirectResponse(address("buffer", **kept, where=list(dict.fromkeys([*asked_for, *short]))), 303)
    filters, mistakes = _readable(asked_for)
    query = _query(source, request, filters)
    after, before = read_parameter(request, "after"), read_parameter(request, "before")
    limit = read_number(request, "limit", _ROWS, least=1, most=500)
    most = 2**31
    earlier = {name: read_number(request, name, 0, least=0, most=most) for name in ("found", "searched")}
    limit = max(1, limit - earlier["found"])
    found = questions.page(source.store, query, limit=limit, after=after, before=before)
    return {
        **vars(query),
        **found,
        "searched": None if found["searched"] is None else found["searched"] + earlier["searched"],
        "found": len(found["rows"]) + earlier["found"],
        "goes_on": not found["complete"] and not before,
        "run_names": questions.run_names(source.store),
        "mistakes": mistakes,
        "kept": kept,
        "command": list_command(source, query),
        "is_first": not (after or before),
    }


def overview(source: OpenBuffer, request: Request) -> QueryResult:
    """Show distributions. Each bar and choice links to the list of trajectories. The link sets or removes a filter."""
    kept, chosen = _kept(request), read_parameters(request, "where")
    query = _query(source, request, chosen)
    found = questions.distributions(source.store, query)

    def toggled(condition: str) -> str:
        rest = [other for other in chosen if other != condition]
        return address("buffer", **kept, where=rest if condition in chosen else [*chosen, condition])

    listed = address("buffer", **kept, where=chosen)
    return {
        **vars(query),
        **found,
        "listed": listed,
        "toggled": toggled,
        "run_names": questions.run_names(source.store),
    }


def _readable(filters: list[str]) -> tuple[list[str], list[dict[str, str]]]:
    """Return the filters that can be read together, and the other filters, each with its error."""
    kept: list[str] = []
    mistakes = []
    for given in filters:
        try:
            conditions([*kept, given])
            kept.append(given)
        except WrongFilter as error:
            mistakes.append({"text": given, "error": str(error)})
    return kept, mistakes


def _query(source: OpenBuffer, request: Request, filters: list[str]) -> Query:
    sort = Sort(read_choice(request, "sort", [Sort.iteration, *Sort]))
    return Query(run_of(source, request), filters, sort, read_choice(request, "order", ("desc", "asc")) == "asc")


def _kept(request: Request) -> dict[str, str]:
    return {name: given for name in _KEPT if (given := read_parameter(request, name))}


def task(source: OpenBuffer, request: Request) -> QueryResult:
    run = run_of(source, request)
    found = questions.task(source.store, read_path_part(request, "hash"), run)
    return {
        **found,
        "payload_text": found["payload"] and json.dumps(found["payload"], indent=2, ensure_ascii=False),
        "most_runs": _MOST_RUNS,
        "most_groups": _GROUPS,
        "asked_run": run,
    }


def tasks(source: OpenBuffer, request: Request) -> QueryResult:
    run = run_of(source, request)
    sort, order = TaskSort(read_choice(request, "sort", TaskSort)), read_choice(request, "order", ("desc", "asc"))
    limit = read_number(request, "limit", _TASKS, least=1, most=5000)
    found = questions.task_list(source.store, run, sort=sort, ascending=order == "asc", limit=limit)
    kept = {name: read_parameter(request, name) for name in ("run", "limit")}
    return {**found, "order": order, "here": partial(address, "tasks", **kept)}


def failures(source: OpenBuffer, request: Request) -> QueryResult:
    run, filters = run_of(source, request), read_parameters(request, "where")
    found = None if run is None or filters else outliers(source.store, run)
    return {**outcomes(source.store, run, filters), "outliers": found}


def kinds(source: OpenBuffer, request: Request) -> QueryResult:
    run, of = run_of(source, request), read_choice(request, "of", ("training", "held-out"))
    held_out = of == "held-out"
    found = slices(source.store, run, read_parameter(request, "by"), held_out=held_out)

    def episodes(row: QueryResult, first: int, last: int) -> str:
        if not held_out:
            return address("buffer", run=run or "*", where=[row["filter"], f"{first} <= iteration <= {last}"])
        return address("runs", run, "held-out", iteration=last, by=found["by"], value=row["value"])

    return {
        **found,
        "here": partial(address, "slices", run=run or "*", of=of),
        "episodes_at": episodes,
        "unsolved": unsolved_held_out(source.store, run) if held_out and run else None,
        "run_names": questions.run_names(source.store),
        **plain_groups({"": [_success_by_value(found)]}, merged=1),
    }


def _success_by_value(found: QueryResult) -> Panel:
    """Make the panel of the values with most episodes, with a point in the middle of each column."""
    most = sorted(found["rows"], key=lambda row: row["episodes"], reverse=True)[:COLOURS]
    curves = []
    for place, row in enumerate(row for row in found["rows"] if row in most):
        cells = zip(found["columns"], row["cells"], strict=True)
        points = [
            ((first + last) // 2, of["successes"] / of["episodes"]) for (first, last), of in cells if of["episodes"]
        ]
        curves.append(Curve(row["value"], points, f"s{place}"))
    how = "The values with most episodes; the number of episodes behind a point is in the table."
    return Panel("Success by value", how, curves, Axis("share of episodes", percent=True, whole=True))


PAGE = Page("/buffer", "buffer.html", listing, tab="buffer")
OVERVIEW = Page("/buffer/overview", "overview.html", overview, tab="buffer")
TASK = Page("/tasks/{hash}", "task.html", task, tab="buffer")
TASKS = Page("/tasks", "tasks.html", tasks, tab="buffer")
SLICES = Page("/slices", "slices.html", kinds, tab="buffer")
OUTCOMES = Page("/outcomes", "outcomes.html", failures, tab="buffer")
