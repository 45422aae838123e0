"""One trajectory: what was said, its tokens, every update that used it; and several side by side."""

import json
from itertools import groupby, zip_longest

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from replay import questions
from replay.errors import ReplayError
from replay.pages.actions import label_form
from replay.pages.addresses import BadQuery, address, choice, in_path, text, texts, whole, whole_number
from replay.pages.page import Page
from replay.pages.reading import codec_of, rescore_command, shown_message, spans, spelled, style_of, unread
from replay.questions import QueryResult, compare
from replay.questions.open_buffer import OpenBuffer

_TURNS = 60
"""Turns of a conversation on one page."""
_MOST_NEIGHBOURS = 16
"""Members of its group that it can be compared with."""
_VIEWS = ("conversation", "tokens", "updates")
_COLORS = ("author", "mask", "behavior", "current", "drift", "advantage")
_MOST_COMPARED = 8
_BEFORE, _AFTER = 48, 240
"""Tokens shown before the first one that differs, and from it on."""
_MESSAGES = 40
"""Places of the conversations on one page, from the first that differs on."""
_ALWAYS_DIFFERENT = ("id", "content_hash", "slot", "member")


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
    names = [author["name"] for author in found["authors"]]
    near = [row for row in found["members"] if row["id"] != id][:_MOST_NEIGHBOURS]
    readable = compare.readable(source.store, [row["id"] for row in near]) if record and not found["problem"] else []
    others = [row for row in near if row["id"] in readable]
    return {
        **found,
        "run": (record or found["reclaimed"] or {}).get("run"),
        "others": others,
        "most_compared": _MOST_COMPARED,
        "unread": unread(source, record["run"]) if record else None,
        "rescore": rescore_command(source, id),
        "label_form": label_form(source, found["labels"], "trajectories", id),
        "view": view,
        "color": choice(request, "color", _COLORS),
        "segment": segment,
        "token": whole(request, "token", -1, least=-1),
        "here": lambda **changes: address("trajectories", id, **changes),
        **(_conversation(found, whole(request, "turn", 0)) if record and view == "conversation" else {}),
        "styles": {name: style_of(name)._asdict() for own in names for name in (own, f"{own}(discard)")},
    }


def _conversation(found: QueryResult, turn: int) -> QueryResult:
    """The turns of one page of the conversation, and the first turns of all its pages."""
    count = len(found["requests"]) or found["record"]["num_turns"]
    first = min(turn, max(0, count - 1)) // _TURNS * _TURNS
    return {
        "spans": spans(found, first, first + _TURNS),
        "shown": shown_message,
        "first_turn": first,
        "turn_pages": list(range(0, count, _TURNS)),
        "page_turns": _TURNS,
        "num": count,
    }


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


def side_by_side(source: OpenBuffer, request: Request) -> QueryResult:
    """`id`, once for each; `segment` is the first whose tokens differ when left out."""
    asked = texts(request, "id")
    if not 2 <= len(asked) <= _MOST_COMPARED:
        raise BadQuery(
            f"id must be given 2 to {_MOST_COMPARED} times, got {len(asked)}. Open a trajectory, and compare it there."
        )
    found = compare.trajectories(source.store, asked)
    ids, parts = found["ids"], found["segments"]
    first = next((part["position"] for part in parts if part["differs"]), 0)
    segment = whole(request, "segment", first)
    if segment >= len(parts):
        raise ReplayError(f"segment must be from 0 to {len(parts) - 1}, got {segment}.")
    part, runs = parts[segment], found["records"]["run"]
    around = max(0, part["same"] - _BEFORE), part["same"] + _AFTER
    return {
        **found,
        "run": runs[0] if len(set(runs)) == 1 else None,
        "segment": segment,
        "part": part,
        "spelled": spelled,
        "sides": [_side(source, found, at, segment, around) for at in range(len(ids))],
        "here": lambda **changes: address("compare", **{"id": ids, "segment": segment, **changes}),
        "different": {name: found["records"][name] for name in found["different"] if name not in _ALWAYS_DIFFERENT},
        "unread": next(filter(None, (unread(source, run) for run in runs)), None),
        **_messages(source, request, found),
    }


def _side(source: OpenBuffer, found: QueryResult, at: int, segment: int, around: tuple[int, int]) -> QueryResult:
    part, id, (begin, end) = found["segments"][segment], found["ids"][at], around
    total = part["tokens"][at]
    tokens = None
    if total:
        codec = codec_of(source)
        tokens = questions.tokens(source.store, id, segment, first=begin, count=end - begin, codec_of=codec)
    return {
        "letter": "ABCDEFGH"[at],
        "id": id,
        "reward": found["records"]["reward"][at],
        "success": found["records"]["success"][at],
        "tokens": tokens,
        "stretches": _stretches(tokens) if tokens else [],
        "before": min(begin, total),
        "after": max(0, total - begin - (len(tokens["token_ids"]) if tokens else 0)),
        "ended": part["differs"] and part["same"] >= total,
    }


def _stretches(tokens: QueryResult) -> list[QueryResult]:
    """Runs of one author, with the places of their tokens."""
    writers = [tokens["author_names"][code] for code in tokens["authors"]]
    stretches = []
    for author, places in groupby(range(len(writers)), key=writers.__getitem__):
        here = list(places)
        turn = tokens["turns"][here[0]]
        stretches.append({"author": author, "style": style_of(author), "turn": turn, "places": here})
    return stretches


def _messages(source: OpenBuffer, request: Request, found: QueryResult) -> QueryResult:
    """What was said at each place, from the first that differs on: before it all said the same."""
    talks = [questions.overview(source.store, id)["messages"] for id in found["ids"]]
    first, longest = found["first_different_message"], max(map(len, talks))
    begin = whole(request, "message", longest if first is None else first, most=longest)
    places = [
        {
            "said": [message and shown_message(message, position) for message in said],
            "differs": any(message != said[0] for message in said),
        }
        for position, said in enumerate(zip_longest(*talks))
        if begin <= position < begin + _MESSAGES
    ]
    following = begin + _MESSAGES if begin + _MESSAGES < longest else None
    return {"places": places, "first_message": begin, "next_message": following, "num_messages": longest}


PAGE = Page("/trajectories/{id}", "trajectory.html", shows, tab="buffer")
TOKENS = Page("/trajectories/{id}/tokens.json", None, tokens)
MESSAGE = Page("/trajectories/{id}/messages/{position}", "message.html", message, tab="buffer")
COMPARE = Page("/compare", "compare.html", side_by_side)
