"""What a run's evaluations were asked and answered: one evaluation, and one held-out task through all of them."""

from __future__ import annotations

from starlette.requests import Request

from replay import questions
from replay.pages.addresses import address, choice, in_path, text, whole
from replay.pages.page import Page
from replay.pages.reading import shown_message
from replay.questions import QueryResult
from replay.questions.open_buffer import OpenBuffer

_ROWS = 50
_ONLY = {"all": None, "success": True, "failed": False}
"""Which episodes are listed."""


def evaluation(source: OpenBuffer, request: Request) -> QueryResult:
    run, only = source.store.run(in_path(request, "run")), choice(request, "only", _ONLY)
    found = questions.held_out(
        source.store,
        run.id,
        None if text(request, "iteration") is None else whole(request, "iteration", 0),
        success=_ONLY[only],
        after=None if text(request, "after") is None else whole(request, "after", 0),
        limit=whole(request, "limit", _ROWS, least=1, most=500),
    )

    def here(**more: object) -> str:
        asked = {"iteration": found["iteration"], "only": only, "limit": text(request, "limit"), **more}
        return address("runs", run.id, "held-out", **asked)

    return {
        **found,
        "name": run.name,
        "made": [
            {**each, "href": here(iteration=each["iteration"]), "is_shown": each["iteration"] == found["iteration"]}
            for each in found["evaluations"]
        ],
        "only": [(name, here(only=name), name == only) for name in _ONLY],
        "further": None if found["next"] is None else here(after=found["next"]),
        "first": here() if text(request, "after") else None,
    }


def task(source: OpenBuffer, request: Request) -> QueryResult:
    run = source.store.run(in_path(request, "run"))
    found = questions.held_out_task(source.store, run.id, in_path(request, "task"))
    said = [
        messages and [shown_message(message, at) for at, message in enumerate(messages)]
        for messages in (each["messages"] for each in found["episodes"])
    ]
    return {**found, "name": run.name, "list": address("runs", run.id, "held-out"), "said": said}


PAGE = Page("/runs/{run}/held-out", "held_out.html", evaluation, tab="run")
TASK = Page("/runs/{run}/held-out/{task}", "held_out_task.html", task, tab="run")
