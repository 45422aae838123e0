"""Trajectories side by side: what differs in their records, where their tokens part, and what each then said."""

from __future__ import annotations

from itertools import groupby, zip_longest

from starlette.requests import Request

from replay import questions
from replay.errors import ReplayError
from replay.pages.addresses import BadQuery, address, texts, whole
from replay.pages.page import Page
from replay.pages.reading import codec_of, shown_message, spelled, style_of, unread
from replay.questions import QueryResult, compare
from replay.questions.open_buffer import OpenBuffer

MOST = 8
"""Trajectories side by side."""
_BEFORE, _AFTER = 48, 240
"""Tokens shown before the first one that differs, and from it on."""
_MESSAGES = 40
"""Places of the conversations on one page, from the first that differs on."""
_ALWAYS_DIFFERENT = ("id", "content_hash", "slot", "member")


def shows(source: OpenBuffer, request: Request) -> QueryResult:
    """`id`, once for each; `segment` is the first whose tokens differ when left out."""
    asked = texts(request, "id")
    if not 2 <= len(asked) <= MOST:
        raise BadQuery(
            f"id must be given 2 to {MOST} times, got {len(asked)}. Open a trajectory, and compare it there."
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
        "sides": [_side(source, found, at, segment, around) for at in range(len(ids))],
        "here": lambda **changes: address("compare", **{"id": ids, "segment": segment, **changes}),
        "different": {name: found["records"][name] for name in found["different"] if name not in _ALWAYS_DIFFERENT},
        "unread": next(filter(None, (unread(source, run) for run in runs)), None),
        **_messages(source, request, found),
    }


def _side(source: OpenBuffer, found: QueryResult, at: int, segment: int, around: tuple[int, int]) -> QueryResult:
    part, id, (begin, end) = found["segments"][segment], found["ids"][at], around
    total = part["tokens"][at]
    difference = part["same"] if part["differs"] else None
    stretches, shown = [], 0
    if total:
        codec = codec_of(source)
        tokens = questions.tokens(source.store, id, segment, first=begin, count=end - begin, codec_of=codec)
        stretches, shown = _stretches(tokens, difference), len(tokens["token_ids"])
    return {
        "letter": "ABCDEFGH"[at],
        "id": id,
        "reward": found["records"]["reward"][at],
        "success": found["records"]["success"][at],
        "stretches": stretches,
        "before": min(begin, total),
        "after": max(0, total - begin - shown),
        "ended": difference is not None and difference >= total,
    }


def _stretches(tokens: QueryResult, difference: int | None) -> list[QueryResult]:
    """Runs of one author, with their tokens as the page shows them."""
    writers = [tokens["author_names"][code] for code in tokens["authors"]]
    stretches = []
    for author, places in groupby(range(len(writers)), key=writers.__getitem__):
        shown = [_token(tokens, t, difference) for t in places]
        turn = tokens["turns"][shown[0]["at"] - tokens["first"]]
        stretches.append({"author": author, "style": style_of(author), "turn": turn, "tokens": shown})
    return stretches


def _token(tokens: QueryResult, t: int, difference: int | None) -> QueryResult:
    at, log_prob = tokens["first"] + t, tokens["behavior_log_probs"][t]
    title = f"token {at:,}, id {tokens['token_ids'][t]}" + ("" if log_prob is None else f", log-prob {log_prob:.4f}")
    return {
        "at": at,
        "text": f"{tokens['token_ids'][t]} " if tokens["texts"] is None else spelled(tokens["texts"][t]),
        "title": title,
        "trained": tokens["loss_mask"][t],
        "is_first": at == difference,
    }


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


PAGE = Page("/compare", "compare.html", shows)
