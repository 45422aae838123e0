"""The pages of one run: its curves and iterations, its workers, its evaluations, and the effect of replay."""

from functools import partial

import yaml
from starlette.requests import Request
from starlette.responses import Response

from replay import questions
from replay.locate import own_folder
from replay.open_buffer import OpenBuffer
from replay.pages.actions import label_form
from replay.pages.addresses import address, read_choice, read_number, read_parameter, read_path_part
from replay.pages.conversation_text import indent_json, shown_message
from replay.pages.page import Page
from replay.pages.panels import Axis, Curve, Panel, plain_groups
from replay.pages.report import duration, run_contents
from replay.questions import QueryResult
from replay.questions.replayed import after_replay, stream_shares, token_gaps
from replay.questions.runs import ALL
from replay.questions.slices import held_out_row

_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""The fastest dumper there is. The one in Python takes longer than the rest of the page."""
_MOST_OTHERS = 12
_MOST_PARTICIPANTS = 100
"""Most rows of the table of participants. The longest silent ones are shown."""
_EPISODES = 50
_ONLY = {"all": None, "success": True, "failed": False}
"""The choices of held-out episodes to list."""


def shows(source: OpenBuffer, request: Request) -> QueryResult | Response:
    """Show the run. The answer is empty if nothing has changed since `mark`. Curves go from `first` to `last`."""
    record = source.store.run(read_path_part(request, "run"))
    run = record.id
    progress = questions.progress(source.store, record, own_folder(source.folder, run))
    mark = f"{progress['mark']}.{progress['state']}"
    if read_parameter(request, "mark") == mark:
        return Response(status_code=204)
    within = range(read_number(request, "first", 0), read_number(request, "last", ALL.stop - 1) + 1)
    others = [(id, name) for id, name in questions.run_names(source.store).items() if id != run]
    contents = run_contents(source.store, record, within)
    return {
        **contents,
        "progress": {**progress, "mark": mark},
        "duration": duration,
        "iteration_link": None
        if contents["is_sft"] or not progress["iteration"]
        else address("runs", run, "iterations") + "/{}",
        "config_text": yaml.dump(dict(record.config), Dumper=_DUMPER, sort_keys=False, allow_unicode=True),
        "others": others[:_MOST_OTHERS],
        "label_form": label_form(source, questions.run_labels_of(source.store, run), "runs", run),
        "by_workers": questions.is_collected_by_workers(source.store, record),
    }


def cluster(source: OpenBuffer, request: Request) -> QueryResult:
    run = source.store.run(read_path_part(request, "run"))
    found = questions.cluster(source.store, run)
    return {
        **found,
        "name": run.name,
        "by_workers": questions.is_collected_by_workers(source.store, run),
        "most": _MOST_PARTICIPANTS,
        "duration": duration,
    }


def evaluation(source: OpenBuffer, request: Request) -> QueryResult:
    run, only = source.store.run(read_path_part(request, "run")), read_choice(request, "only", _ONLY)
    by, value = read_parameter(request, "by"), read_parameter(request, "value")
    found = questions.held_out(
        source.store,
        run.id,
        None if read_parameter(request, "iteration") is None else read_number(request, "iteration", 0),
        success=_ONLY[only],
        which=held_out_row(source.store, run.id, by, value) if by and value else None,
        after=None if read_parameter(request, "after") is None else read_number(request, "after", 0),
        limit=read_number(request, "limit", _EPISODES, least=1, most=500),
    )
    asked = {"iteration": found["iteration"], "only": only, "limit": read_parameter(request, "limit")}
    return {
        **found,
        "name": run.name,
        "here": partial(address, "runs", run.id, "held-out", **asked, by=by, value=value),
        "choices": list(_ONLY),
        "only": only,
        "by": by,
        "value": value,
        "is_first": read_parameter(request, "after") is None,
    }


def held_out_task(source: OpenBuffer, request: Request) -> QueryResult:
    run = source.store.run(read_path_part(request, "run"))
    found = questions.held_out_task(source.store, run.id, read_path_part(request, "task"))
    payload = found["payload"] and (indent_json(found["payload"]) or found["payload"])
    back = address("runs", run.id, "held-out")
    return {**found, "payload": payload, "name": run.name, "list": back, "shown": shown_message}


def replayed(source: OpenBuffer, request: Request) -> QueryResult:
    run = source.store.run(read_path_part(request, "run"))
    shares = stream_shares(source.store, run.id)
    pushes = [(each["iteration"], each["advantage"]) for each in shares if each["advantage"] is not None]
    rows = [(each["iteration"], each["rows"]) for each in shares]
    panel = Panel(
        "Replay's share",
        "Of the rows, and of their sum of |advantage × weight|. If the second share is higher, replay pushes harder.",
        [Curve("of |advantage × weight|", pushes, "replay"), Curve("of the rows", rows, "ink", dashed=True)],
        Axis(unit="share", percent=True, whole=True),
    )
    return {
        "run": run.id,
        "name": run.name,
        **plain_groups({"": [panel]}, merged=1, replayed=not rows or any(share for _, share in rows)),
        "gaps": token_gaps(source.store, run.id),
    }


def followed_replay(source: OpenBuffer, request: Request) -> QueryResult:
    run = source.store.run(read_path_part(request, "run")).id
    return {"run": run, "after": after_replay(source.store, run)}


PAGE = Page("/runs/{run}", "run.html", shows, tab="run")
CLUSTER = Page("/runs/{run}/cluster", "cluster.html", cluster, tab="run")
HELD_OUT = Page("/runs/{run}/held-out", "held_out.html", evaluation, tab="run")
HELD_OUT_TASK = Page("/runs/{run}/held-out/{task}", "held_out_task.html", held_out_task, tab="run")
REPLAYED = Page("/runs/{run}/replayed", "replayed.html", replayed, tab="run")
AFTER_REPLAY = Page("/runs/{run}/after-replay", "after_replay.html", followed_replay, tab="run")
