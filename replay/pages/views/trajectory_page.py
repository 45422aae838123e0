"""One trajectory: what was said, its tokens, and every update that used it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from replay import questions
from replay.errors import ReplayError
from replay.pages.addresses import address, choice, in_path, text, whole, whole_number
from replay.pages.charts import Axis, Curve, Panel, plain_panel
from replay.pages.page import Page
from replay.pages.reading import codec_of, has_run, rescore_command, style_of, turns, unread
from replay.pages.views.compare_page import MOST as MOST_COMPARED
from replay.questions import QueryResult
from replay.questions.open_buffer import OpenBuffer
from replay.records import ELIGIBLE, FRESH, ORPHANED, REPLAY, UNTRAINABLE

_TURNS = 60
"""Turns of a conversation on one page."""
_VIEWS = ("conversation", "tokens", "updates")
"""The parts of the page."""
_COLORS = ("author", "mask", "behavior", "current", "drift", "advantage")
"""What tokens can be coloured by."""


def shows(source: OpenBuffer, request: Request) -> QueryResult | Response:
    given = in_path(request, "id")
    found = questions.overview(source.store, given, codec_of=codec_of(source))
    id, record, segments = found["id"], found["record"], found["segments"]
    if given != id:
        return RedirectResponse(address("trajectories", id, **dict(request.query_params)), 303)
    about_tokens = any(text(request, name) for name in ("color", "segment", "token"))
    view = choice(request, "view", ["tokens" if about_tokens else "conversation", *_VIEWS])
    segment = whole(request, "segment", 0)
    if segments and segment >= len(segments):
        raise ReplayError(f"segment must be from 0 to {len(segments) - 1}, got {segment}.")
    members = [row["id"] for row in found["members"]]
    place = members.index(id) if id in members else None
    names = [author["name"] for author in found["authors"]]
    others = [member for member in members if member != id][: MOST_COMPARED - 1]
    return {
        **found,
        "run": (record or found["reclaimed"] or {}).get("run"),
        "previous": members[place - 1] if place else None,
        "next": members[place + 1] if place is not None and place + 1 < len(members) else None,
        "compare_all": address("compare", id=[id, *others]) if len(others) > 1 else None,
        "unread": unread(source, record["run"]) if record else None,
        "unscorable": _unscorable(found),
        "rescore": rescore_command(source, id),
        "view": view,
        "views": _VIEWS,
        "color": choice(request, "color", _COLORS),
        "segment": segment,
        "token": whole(request, "token", -1, least=-1),
        "has_run": has_run(source),
        "here": lambda **changes: address("trajectories", id, **changes),
        **(_conversation(found, whole(request, "turn", 0)) if record and view == "conversation" else {}),
        "charts": _charts(found) if view == "updates" else {},
        "styles": {name: style_of(name)._asdict() for own in names for name in (own, f"{own}(discard)")},
    }


def _unscorable(found: QueryResult) -> str | None:
    """Why no policy can score it; None where one can."""
    record = found["record"]
    if not found["segments"]:
        return "Its tokens are not there."
    if record["state"] not in (ELIGIBLE, UNTRAINABLE, ORPHANED):
        return f"Rows that are {record['state']} are not scored."
    if not record["num_action_tokens"]:
        return "None of its tokens was sampled."
    return None if record["temperature"] > 0 else "It was sampled at temperature 0, where log-probs mean nothing."


def _conversation(found: QueryResult, turn: int) -> QueryResult:
    """The turns of one page of the conversation, and the first turns of all its pages."""
    count = found["record"]["num_turns"]
    first = min(turn, max(0, count - 1)) // _TURNS * _TURNS
    shown = turns(found["messages"], found["authors"], count, first=first, count=_TURNS)
    return {"turns": shown, "first_turn": first, "turn_pages": list(range(0, count, _TURNS)), "page_turns": _TURNS}


def _charts(found: QueryResult) -> QueryResult:
    """What its own run's updates did to it, over iterations; the table has all of them."""
    uses = [use for use in found["uses"] if found["record"] and use["run"] == found["record"]["run"]]
    return {panel["key"]: panel for panel in map(plain_panel, _panels(uses))} if len(uses) > 1 else {}


def _panels(uses: Sequence[QueryResult]) -> list[Panel]:
    def curves(name: str, label: str = "", *, dashed: bool = False) -> list[Curve]:
        by_stream = {stream: [use for use in uses if use["stream"] == stream] for stream in (FRESH, REPLAY)}
        return [
            Curve(
                f"{stream}{label}",
                [(use["iteration"], use[name]) for use in found if use[name] is not None],
                stream,
                dashed=dashed,
                marker="square" if stream == REPLAY else "circle",
            )
            for stream, found in by_stream.items()
            if found
        ]

    clipped, share = curves("clip_fraction"), curves("ess_share")
    drift = [*curves("drift_mean", ", mean"), *curves("drift_max", ", most", dashed=True)]
    around, percent = Axis(reference=1.0, least_span=0.02), Axis(percent=True, from_zero=True, least_span=0.01)
    return [
        Panel("Drift", "How far the policy had moved from its sampled tokens; 1 is not at all.", drift, around),
        Panel("ESS share", "Its weight over the sum of its stream's.", share, percent),
        Panel("Clip fraction", "Its trained tokens whose loss the clip range decided.", clipped, percent),
    ]


def tokens(source: OpenBuffer, request: Request) -> QueryResult:
    """A stretch of one segment's tokens, which the token view asks for."""
    id = questions.find(source.store, in_path(request, "id"))
    count = whole(request, "count", questions.MOST_TOKENS, least=1, most=questions.MOST_TOKENS)
    segment, first = whole(request, "segment", 0), whole(request, "first", 0)
    return questions.tokens(source.store, id, segment, first=first, count=count, codec_of=codec_of(source))


def message(source: OpenBuffer, request: Request) -> QueryResult:
    """One message to its last character."""
    found = questions.overview(source.store, in_path(request, "id"))
    if found["problem"] is not None:
        reason = found["problem"]["reason"]
        raise ReplayError(f"trajectory {found['id']} must have its messages, got one without: {reason}.")
    position, messages = whole_number("position", in_path(request, "position")), found["messages"]
    if position >= len(messages):
        raise ReplayError(f"message must be from 0 to {len(messages) - 1}, got {position}.")
    said = messages[position]
    calls = [
        {**call, "text": json.dumps(call["arguments"], ensure_ascii=False, indent=2)} for call in said["tool_calls"]
    ]
    return {"run": found["record"]["run"], "id": found["id"], "position": position, "message": said, "calls": calls}


PAGE = Page("/trajectories/{id}", "trajectory.html", shows, tab="buffer")
TOKENS = Page("/trajectories/{id}/tokens.json", None, tokens)
MESSAGE = Page("/trajectories/{id}/messages/{position}", "message.html", message, tab="buffer")
