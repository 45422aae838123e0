"""The pages of one trajectory: its conversation, its tokens, and every update that used it."""

from functools import partial

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from replay import questions
from replay.errors import ReplayError
from replay.open_buffer import OpenBuffer
from replay.pages.actions import label_form
from replay.pages.addresses import address, read_choice, read_number, read_parameter, read_path_part
from replay.pages.commands import rescore_command
from replay.pages.conversation_text import find_spans, shown_message, style_of
from replay.pages.page import Page
from replay.pages.panels import plain_groups, use_panels
from replay.questions import CodecOf, QueryResult

_TURNS = 60
"""Turns of a conversation on one page."""
_VIEWS = ("conversation", "tokens", "updates")
_COLORS = ("author", "mask", "behavior", "current", "drift", "advantage")


def codec_of(source: OpenBuffer) -> CodecOf:
    """Return the opened run's tokenizer for each run that has the same one."""
    return lambda run: source.tokenizer() if unread(source, run) is None else None


def unread(source: OpenBuffer, run: str) -> str | None:
    """Return the reason why a run's tokens are shown as ids. None: they are shown as text."""
    if source.tokenizer() is None:
        if source.folder is None:
            return (
                "The tokenizer is in the run's folder, but a database was opened. Open the run's folder to read text."
            )
        return "No tokenizer lies beside the database: a run's folder has it in start/tokenizer.json."
    if source.own_run is None or questions.same_tokenizer(source.store, source.own_run, run):
        return None
    return f"The row is of run {run}, which is not known to have the tokenizer of the opened run."


def shows(source: OpenBuffer, request: Request) -> QueryResult | Response:
    given = read_path_part(request, "id")
    found = questions.overview(source.store, given, codec_of=codec_of(source))
    id, record, segments = found["id"], found["record"], found["segments"]
    if given != id:
        return RedirectResponse(address("trajectories", id, **dict(request.query_params)), 303)
    about_tokens = any(read_parameter(request, name) for name in ("color", "segment", "token"))
    view = read_choice(request, "view", ["tokens" if about_tokens else "conversation", *_VIEWS])
    segment = read_number(request, "segment", 0)
    if segments and segment >= len(segments):
        raise ReplayError(f"segment must be from 0 to {len(segments) - 1}, got {segment}.")
    names = [author["name"] for author in found["authors"]]
    return {
        **found,
        "run": (record or found["reclaimed"] or {}).get("run"),
        "unread": unread(source, record["run"]) if record else None,
        "rescore": rescore_command(source, id),
        "label_form": label_form(source, found["labels"], "trajectories", id),
        "view": view,
        "color": read_choice(request, "color", _COLORS),
        "segment": segment,
        "token": read_number(request, "token", -1, least=-1),
        "here": partial(address, "trajectories", id),
        **(plain_groups(use_panels(found["uses"]), merged=1) if view == "updates" or not record else {}),
        **(_conversation(found, read_number(request, "turn", 0)) if record and view == "conversation" else {}),
        "styles": {name: style_of(name) for own in names for name in (own, f"{own}(discard)")},
    }


def _conversation(found: QueryResult, turn: int) -> QueryResult:
    """Return the turns of one page of the conversation, and the first turn of every page."""
    count = len(found["requests"]) or found["record"]["num_turns"]
    first = min(turn, max(0, count - 1)) // _TURNS * _TURNS
    return {
        "spans": find_spans(found, first, first + _TURNS),
        "shown": shown_message,
        "first_turn": first,
        "turn_pages": list(range(0, count, _TURNS)),
        "page_turns": _TURNS,
        "num": count,
    }


def tokens(source: OpenBuffer, request: Request) -> QueryResult:
    """Send a range of one segment's tokens, which the script of the token view asks for."""
    id = questions.find(source.store, read_path_part(request, "id"))
    count = read_number(request, "count", questions.MOST_TOKENS, least=1, most=questions.MOST_TOKENS)
    segment, first = read_number(request, "segment", 0), read_number(request, "first", 0)
    return questions.tokens(source.store, id, segment, first=first, count=count, codec_of=codec_of(source))


PAGE = Page("/trajectories/{id}", "trajectory.html", shows, tab="buffer")
TOKENS = Page("/trajectories/{id}/tokens.json", None, tokens)
