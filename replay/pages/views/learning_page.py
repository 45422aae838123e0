"""What was learned, and from what: tasks over time, failures against successes, and what replay did."""

from starlette.requests import Request

from replay import questions
from replay.pages.addresses import address, choice, in_path, text, texts, whole
from replay.pages.page import Page, run_of
from replay.pages.panels import Axis, Curve, Panel, plain_groups
from replay.questions import QueryResult, TaskSort
from replay.questions.open_buffer import OpenBuffer
from replay.questions.outcomes import outcomes
from replay.questions.replayed import after_replay, stream_shares, token_gaps

_TASKS = 100


def tasks(source: OpenBuffer, request: Request) -> QueryResult:
    run = run_of(source, request)
    sort, order = TaskSort(choice(request, "sort", TaskSort)), choice(request, "order", ("desc", "asc"))
    limit = whole(request, "limit", _TASKS, least=1, most=5000)
    found = questions.task_list(source.store, run, sort=sort, ascending=order == "asc", limit=limit)

    def here(**more: object) -> str:
        return address("tasks", run=text(request, "run"), **{"limit": text(request, "limit"), **more})

    return {**found, "order": order, "here": here}


def failures(source: OpenBuffer, request: Request) -> QueryResult:
    return outcomes(source.store, run_of(source, request), texts(request, "where"))


def replayed(source: OpenBuffer, request: Request) -> QueryResult:
    run = source.store.run(in_path(request, "run"))
    shares = stream_shares(source.store, run.id)
    pushes = [(each["iteration"], each["advantage"]) for each in shares if each["advantage"] is not None]
    rows = [(each["iteration"], each["rows"]) for each in shares]
    panel = Panel(
        "Replay's share",
        "Of the rows, and of the sum of |advantage × weight| over them. Far above the rows: replay pushes the harder.",
        [Curve("of |advantage × weight|", pushes, "replay"), Curve("of the rows", rows, "ink", dashed=True)],
        Axis(unit="share", percent=True, whole=True),
    )
    return {
        "run": run.id,
        "name": run.name,
        **plain_groups({"": [panel]}, merged=1),
        "after": after_replay(source.store, run.id),
        "gaps": token_gaps(source.store, run.id),
    }


TASKS = Page("/tasks", "tasks.html", tasks, tab="buffer")
OUTCOMES = Page("/outcomes", "outcomes.html", failures, tab="buffer")
REPLAYED = Page("/runs/{run}/replayed", "replayed.html", replayed, tab="run")
