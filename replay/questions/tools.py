"""The tools of a run: calls, errors and repeats of each tool, and the success of episodes with it and without it."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import sqlalchemy as sa

from context.authors import INITIALIZATION
from context.messages import Message, ToolCall
from replay.questions.filters.query import QueryResult
from replay.questions.runs import Series, merged_to, metric_series
from replay.questions.trajectory import conversations_of
from replay.storage.format.schema import trajectories
from replay.storage.format.views import IS_EPISODE
from replay.store import ReplayStore

_rows = trajectories.c
UNREADABLE = "(unreadable call)"
"""The name for the tool of calls that could not be read."""
_MALFORMED = "malformed"
"""The kind of error of such a call."""
_SECONDS = "time/tool/"
_POINTS = 16
"""Most points of a curve if some episodes are not read. More of them would be noise."""


class _Call(NamedTuple):
    episode: str
    point: int
    """The first of the iterations that are merged into the episode's point."""
    success: bool
    tool: str
    error: str | None
    repeated: bool


def tools(store: ReplayStore, run: str, *, most: int | None = None) -> QueryResult:
    """Return how a run's episodes called tools, from the messages of at most `most` episodes (None: of all).

    `read` of all `episodes` were read, evenly over the run. A line of `tools` has the `calls`, those that were
    `repeated` (equal to an earlier one of the episode), `errors` by kind, the number of `episodes` that called the tool
    and their `share`, and the success `with_tool` and `without`. `seconds_p50` and `seconds_p95` are quantiles of the
    iterations' means, because seconds of single calls are not stored. None: not known.

    `iterations` has `calls` per episode, the shares of failed calls by kind (`errors`), and the shares of episodes that
    called each tool (`using`). A line merges `merged` iterations.
    """
    count = sa.select(sa.func.count(), sa.func.max(_rows.iteration)).where(_rows.run == run, IS_EPISODE)
    with store.reading() as connection:
        total, newest = connection.execute(count).one()
        every = 1 if most is None else max(1, -(-total // most))
        merged = merged_to((newest or 1) * (1 if every == 1 else 256 // _POINTS))
        read = list(_read(connection, run, every, merged))
    solved = [success for _, success, _ in read]
    calls = [call for *_, of_episode in read for call in of_episode]
    by_tool: dict[str, list[_Call]] = defaultdict(list)
    by_point: dict[int, list[_Call]] = {point: [] for point, *_ in read}
    for call in calls:
        by_tool[call.tool].append(call)
        by_point[call.point].append(call)
    seconds = metric_series(store, run, families=(_SECONDS,))
    named = sorted(by_tool.items(), key=lambda each: (-len(each[1]), each[0]))
    kinds, counts = _errors(calls), Counter(point for point, *_ in read)
    lines = []
    for point, of in sorted(by_point.items()):
        failed, using = _errors(of), Counter(tool for _, tool in {(call.episode, call.tool) for call in of})
        errors = {kind: failed.get(kind, 0) / len(of) for kind in kinds if of}
        shares = {name: using[name] / counts[point] for name, _ in named}
        lines.append({"iteration": point, "calls": len(of) / counts[point], "errors": errors, "using": shares})
    listed = [{"name": name, **_tool(of, solved), **_quantiles(seconds.get(_SECONDS + name, ()))} for name, of in named]
    return {"run": run, "episodes": total, "read": len(read), "merged": merged, "tools": listed, "iterations": lines}


def _read(connection: sa.Connection, run: str, every: int, merged: int) -> Iterator[tuple[int, bool, list[_Call]]]:
    """Yield point, success and calls of each `every`-th episode, if its messages can be read."""
    number = sa.func.row_number().over(order_by=(_rows.iteration, _rows.slot, _rows.id)).label("number")
    columns = (_rows.id, _rows.iteration, _rows.success, _rows.error_kinds)
    of = sa.select(*columns, number).where(_rows.run == run, IS_EPISODE).subquery().c
    chosen = sa.select(*(of[column.name] for column in columns)).where(of.number % every == 0)
    facts = {id: each for id, *each in connection.execute(chosen)}
    for id, said in conversations_of(connection, [*facts]):
        iteration, success, error_kinds = facts[id]
        if said is not None:
            point = iteration if iteration < 1 else iteration - (iteration - 1) % merged
            yield point, bool(success), [*_calls_of((id, point, bool(success)), said, error_kinds)]


def paired_calls(
    said: Sequence[Message], error_kinds: str | None
) -> Iterator[tuple[int, ToolCall | None, Message | None, str | None]]:
    """Yield each call of a conversation: the place of its message, the call, its answer, and the kind of its error.

    A call is None if it could not be read. An answer is None if it is not stored, because the episode ended with the
    call. Of an unreadable call that ended its episode only the row's `error_kinds` know.

    An answer is of the call with its id; without ids, of the first call that has none.
    """
    unreadable = (error_kinds or "").split().count(_MALFORMED)
    for place, message in enumerate(said):
        answers = list(takewhile(lambda answer: answer.role == "tool", said[place + 1 :]))
        if message.role == "tool":
            continue
        for call in message.tool_calls:
            answer = next((each for each in answers if each.tool_call_id == call.id), None)
            if answer is not None:
                answers.remove(answer)
            yield place, call, answer, None if answer is None else answer.error_kind
        for answer in (each for each in answers if each.error_kind is not None):
            unreadable -= answer.error_kind == _MALFORMED
            yield place, None, answer, answer.error_kind
    if said:
        yield from [(len(said) - 1, None, None, _MALFORMED)] * unreadable


def _calls_of(episode: tuple[str, int, bool], said: Sequence[Message], error_kinds: str | None) -> Iterator[_Call]:
    seen = set[str]()
    for place, call, _, error_kind in paired_calls(said, error_kinds):
        if said[place].author == INITIALIZATION:
            continue
        name = UNREADABLE if call is None else call.name
        key = None if call is None else repr((call.name, sorted(call.arguments.items())))
        yield _Call(*episode, name, error_kind, repeated=key in seen)
        seen.update([key] if key else [])


def _errors(calls: Iterable[_Call]) -> dict[str, int]:
    return dict(Counter(call.error for call in calls if call.error is not None).most_common())


def _tool(calls: Sequence[_Call], solved: Sequence[bool]) -> QueryResult:
    using = {call.episode: call.success for call in calls}
    others = len(solved) - len(using)
    return {
        "calls": len(calls),
        "repeated": sum(call.repeated for call in calls),
        "errors": _errors(calls),
        "episodes": len(using),
        "share": len(using) / len(solved),
        "with_tool": sum(using.values()) / len(using),
        "without": (sum(solved) - sum(using.values())) / others if others else None,
    }


def _quantiles(means: Series) -> QueryResult:
    half, most = np.quantile([value for _, value in means], (0.5, 0.95)).tolist() if means else (None, None)
    return {"seconds_p50": half, "seconds_p95": most}
