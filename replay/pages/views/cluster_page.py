"""A run that workers collect: who waits for whom, where every episode is, and who takes part."""

from __future__ import annotations

from starlette.requests import Request

from replay import questions
from replay.locate import own_folder
from replay.pages.addresses import in_path
from replay.pages.page import Page
from replay.pages.reading import typed
from replay.questions import QueryResult
from replay.questions.cluster import PARTS
from replay.questions.open_buffer import OpenBuffer
from replay.questions.who_waits import advised_command, seconds
from replay.ticket_records import TICKET_STATES

_MOST_PARTICIPANTS = 100
"""Rows of a table: those that have been silent for longest."""


def shows(source: OpenBuffer, request: Request) -> QueryResult:
    run = source.store.run(in_path(request, "run"))
    found = questions.cluster(source.store, run)
    advised = advised_command(found["waits"]["advice"], own_folder(source.folder, run.id))
    counts = found["counts"]
    return {
        **found,
        "name": run.name,
        "seconds": seconds,
        "advised": typed(advised) if advised else None,
        "parts": [(name, counts[name]) for name in PARTS],
        "missing": counts["done"] - counts["rows"],
        "ticket_states": [(name, counts[name], found["evaluations"][name]) for name in TICKET_STATES],
        "live_workers": sum(not each["gone"] for each in found["workers"]),
        "serving": sum(each["state"] == "serving" for each in found["engines"]),
        "most": _MOST_PARTICIPANTS,
    }


PAGE = Page("/runs/{run}/cluster", "cluster.html", shows, tab="run")
