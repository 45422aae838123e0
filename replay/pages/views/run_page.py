"""One run: its curves, what went into its batches, its newest iterations; new ones come while it goes on."""

from __future__ import annotations

import yaml
from starlette.requests import Request
from starlette.responses import Response

from replay import questions
from replay.locate import own_folder
from replay.pages.addresses import address, in_path, text, whole
from replay.pages.page import Page
from replay.pages.reading import typed
from replay.pages.report import run_contents
from replay.questions import QueryResult
from replay.questions.cluster import PARTS
from replay.questions.open_buffer import OpenBuffer
from replay.questions.runs import ALL
from replay.questions.who_waits import advised_command, seconds
from replay.ticket_records import TICKET_STATES

_MOST_OTHERS = 12
_MOST_PARTICIPANTS = 100
"""Rows of a table: those that have been silent for longest."""


def shows(source: OpenBuffer, request: Request) -> QueryResult | Response:
    """The page; nothing where `mark` says that nothing has changed. From `first` to `last`, the points of a stretch."""
    record = source.store.run(in_path(request, "run"))
    run = record.id
    progress = questions.progress(source.store, record, own_folder(source.folder, run))
    mark = f"{progress['mark']}.{progress['state']}"
    if text(request, "mark") == mark:
        return Response(status_code=204)
    within = range(whole(request, "first", 0), whole(request, "last", ALL.stop - 1) + 1)
    others = [(id, name) for id, name in questions.run_names(source.store).items() if id != run]
    return {
        **run_contents(source.store, record, within),
        "progress": {**progress, "mark": mark},
        "seconds": seconds,
        "iteration_link": address("runs", run, "iterations") + "/{}",
        "config_text": yaml.safe_dump(dict(record.config), sort_keys=False, allow_unicode=True),
        "others": others[:_MOST_OTHERS],
        "by_workers": questions.is_collected_by_workers(source.store, record),
    }


def cluster(source: OpenBuffer, request: Request) -> QueryResult:
    """The page of a run that workers collect: who waits for whom, where every episode is, and who takes part."""
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


PAGE = Page("/runs/{run}", "run.html", shows, tab="run")
CLUSTER = Page("/runs/{run}/cluster", "cluster.html", cluster, tab="run")
