"""What a run's evaluations were asked and answered: one evaluation, and one held-out task through all of them."""

from __future__ import annotations

import shlex
from enum import StrEnum
from typing import Any

from replay import queries
from replay.inspector.server.page_views import Page
from replay.inspector.server.query_string import QueryString, address
from replay.inspector.text.conversation import ShownMessage, shown_message
from replay.queries import QueryResult
from replay.queries.open_buffer import OpenBuffer

_ROWS = 50
_MOST_ROWS = 500


class Only(StrEnum):
    """Which episodes are listed."""

    all = "all"
    success = "success"
    failed = "failed"


_SUCCESS = {Only.all: None, Only.success: True, Only.failed: False}


def answer(source: OpenBuffer, query: QueryString) -> QueryResult:
    run = source.store.run(query.path("run"))
    found = queries.held_out(
        source.store,
        run.id,
        None if query.text("iteration") is None else query.whole("iteration", 0),
        success=_SUCCESS[query.choice("only", Only.all)],
        after=None if query.text("after") is None else query.whole("after", 0),
        limit=query.whole("limit", _ROWS, least=1, most=_MOST_ROWS),
    )
    return {**found, "name": run.name}


def shows(source: OpenBuffer, query: QueryString, found: QueryResult) -> dict[str, Any]:
    run, only = found["run"], query.choice("only", Only.all)

    def here(**more: object) -> str:
        asked = {"iteration": found["iteration"], "only": only, "limit": query.text("limit"), **more}
        return address("runs", run, "held-out", **asked)

    words = ["agentloop", "replay", "held-out", *source.run_words]
    return {
        "made": [
            {**each, "href": here(iteration=each["iteration"]), "is_shown": each["iteration"] == found["iteration"]}
            for each in found["evaluations"]
        ],
        "only": [(each.value, here(only=each), each is only) for each in Only],
        "further": None if found["next"] is None else here(after=found["next"]),
        "first": here() if query.text("after") else None,
        "command": shlex.join(words),
    }


def task_answer(source: OpenBuffer, query: QueryString) -> QueryResult:
    run = source.store.run(query.path("run"))
    return {**queries.held_out_task(source.store, run.id, query.path("task")), "name": run.name}


def task_shows(source: OpenBuffer, query: QueryString, found: QueryResult) -> dict[str, Any]:
    words = ["agentloop", "replay", "held-out", "--task", found["task"][:12], *source.run_words]
    return {
        "list": address("runs", found["run"], "held-out"),
        "said": [_conversation(each["messages"]) for each in found["episodes"]],
        "command": shlex.join(words),
    }


def _conversation(messages: list[QueryResult] | None) -> list[ShownMessage] | None:
    """None where the messages can't be read."""
    return None if messages is None else [shown_message(message, place) for place, message in enumerate(messages)]


PAGE = Page("/runs/{run}/held-out", "held_out.html", answer, tab="run", shows=shows)
TASK = Page("/runs/{run}/held-out/{task}", "held_out_task.html", task_answer, tab="run", shows=task_shows)
