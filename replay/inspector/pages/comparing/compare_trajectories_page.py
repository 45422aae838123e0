"""Two trajectories side by side: what differs in their records, where their tokens part, and what each then said."""

from __future__ import annotations

from itertools import pairwise, zip_longest
from typing import Any

from replay import queries
from replay.errors import ReplayError
from replay.inspector.server.query_string import BadQuery, QueryString, address
from replay.inspector.text.conversation import ShownMessage, shown_message
from replay.inspector.text.reading import codec_of, spelled, unread, voice
from replay.queries import QueryResult, compare
from replay.queries.open_buffer import OpenBuffer

_BEFORE, _AFTER = 48, 240
"""Tokens shown before the first one that differs, and from it on."""
_MOST_AROUND = 4_000
_MESSAGES = 40
"""Pairs on one page, from the first that differs on."""
_ALWAYS_DIFFERENT = ("id", "content_hash", "slot", "member")


def answer(source: OpenBuffer, query: QueryString) -> QueryResult:
    """The comparison of `a` and `b`; `segment` is the first whose tokens differ when left out."""
    names = [query.text(name) for name in ("a", "b")]
    if None in names:
        raise BadQuery("a and b must each be the id of a trajectory, got one or none. Open one, and compare it there.")
    found = compare.trajectories(source.store, str(names[0]), str(names[1]))
    parts = found["segments"]
    first = next((part["position"] for part in parts if part["first_difference"]), 0)
    segment = query.whole("segment", first)
    if segment >= len(parts):
        raise ReplayError(f"segment must be from 0 to {len(parts) - 1}, got {segment}.")
    begin = max(0, parts[segment]["same"] - query.whole("before", _BEFORE, most=_MOST_AROUND))
    end = parts[segment]["same"] + query.whole("after", _AFTER, least=1, most=_MOST_AROUND)
    runs = found["records"]["run"]
    return {
        "kind": "trajectories",
        "run": runs[0] if runs[0] == runs[1] else None,
        **found,
        "segment": segment,
        "tokens": [
            queries.tokens(source.store, id, segment, first=begin, count=end - begin, codec_of=codec_of(source))
            if parts[segment]["tokens"][side]
            else None
            for side, id in enumerate(found["ids"])
        ],
    }


def shows(source: OpenBuffer, query: QueryString, found: QueryResult) -> dict[str, Any]:
    part = found["segments"][found["segment"]]
    kept = {"a": found["ids"][0], "b": found["ids"][1]}
    around = {"before": query.text("before"), "after": query.text("after")}
    difference = part["first_difference"] and part["first_difference"]["index"]
    return {
        "part": part,
        "sides": [_side(found, side, difference) for side in range(2)],
        "here": lambda **changes: address("compare", **{**kept, **around, "segment": found["segment"], **changes}),
        "records": {name: found["records"][name] for name in found["different"] if name not in _ALWAYS_DIFFERENT},
        "unread": next(filter(None, (unread(source, run) for run in found["records"]["run"])), None),
        "wider": {"before": _MOST_AROUND, "after": _MOST_AROUND},
        **_messages(source, query, found),
    }


def _side(found: QueryResult, side: int, difference: int | None) -> QueryResult:
    tokens = found["tokens"][side]
    return {
        "letter": "AB"[side],
        "id": found["ids"][side],
        "reward": found["records"]["reward"][side],
        "success": found["records"]["success"][side],
        "stretches": [] if tokens is None else _stretches(tokens, difference),
        "before": tokens["first"] if tokens else 0,
        "after": tokens["total"] - tokens["first"] - len(tokens["token_ids"]) if tokens else 0,
        "ended": difference is not None and (tokens is None or difference >= tokens["total"]),
    }


def _stretches(tokens: QueryResult, difference: int | None) -> list[QueryResult]:
    """Runs of one author, with their tokens as the page shows them."""
    writers = tokens["authors"]
    starts = [t for t in range(len(writers)) if t == 0 or writers[t] != writers[t - 1]]
    return [
        {
            "author": tokens["author_names"][writers[start]],
            "voice": voice(tokens["author_names"][writers[start]]),
            "turn": tokens["turns"][start],
            "tokens": [_token(tokens, t, difference) for t in range(start, end)],
        }
        for start, end in pairwise([*starts, len(writers)])
    ]


def _token(tokens: QueryResult, t: int, difference: int | None) -> QueryResult:
    at, log_prob = tokens["first"] + t, tokens["behavior_log_probs"][t]
    shown = f"token {at:,}, id {tokens['token_ids'][t]}" + ("" if log_prob is None else f", log-prob {log_prob:.4f}")
    text = None if tokens["texts"] is None else tokens["texts"][t]
    return {
        "text": spelled(text) if tokens["texts"] is not None else f"{tokens['token_ids'][t]} ",
        "title": shown,
        "trained": tokens["loss_mask"][t],
        "is_first": at == difference,
    }


def _messages(source: OpenBuffer, query: QueryString, found: QueryResult) -> QueryResult:
    """Pairs from the first that differs on; those before are the same on both sides."""
    talks = [queries.overview(source.store, id)["messages"] for id in found["ids"]]
    first, longest = found["first_different_message"], max(map(len, talks))
    begin = query.whole("message", longest if first is None else first, most=longest)
    pairs: list[tuple[ShownMessage | None, ShownMessage | None, bool]] = [
        (left and shown_message(left, position), right and shown_message(right, position), left != right)
        for position, (left, right) in enumerate(zip_longest(*talks))
        if begin <= position < begin + _MESSAGES
    ]
    following = begin + _MESSAGES if begin + _MESSAGES < longest else None
    return {"pairs": pairs, "first_message": begin, "next_message": following, "num_messages": longest}
