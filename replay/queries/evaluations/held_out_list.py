"""Episodes of evaluations: those of one evaluation, and one task through all of them."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from context.messages import Message, plain_message
from replay.errors import ReplayError
from replay.queries.excerpts import NONE, in_few_words
from replay.queries.filters.query import QueryResult
from replay.storage.collecting.held_out_rows import FACTS, SAID
from replay.storage.format.encoding import BlobError
from replay.storage.format.message_json import messages_of
from replay.storage.format.schema import held_out as episodes
from replay.store import ReplayStore

_FACTS = [episodes.c[name] for name in FACTS]
_SAID = [episodes.c[name] for name in SAID]


def evaluations(connection: sa.Connection, run: str) -> list[QueryResult]:
    """The evaluations of which episodes are kept, oldest first."""
    successes = sa.cast(sa.func.sum(sa.cast(episodes.c.success, sa.Integer)), sa.BigInteger)
    query = sa.select(
        episodes.c.iteration, sa.func.count().label("episodes"), sa.func.coalesce(successes, 0).label("successes")
    )
    mine = query.where(episodes.c.run == run).group_by(episodes.c.iteration).order_by(episodes.c.iteration)
    return [dict(row) for row in connection.execute(mine).mappings()]


def held_out(
    store: ReplayStore,
    run: str,
    iteration: int | None = None,
    *,
    success: bool | None = None,
    after: int | None = None,
    limit: int = 50,
) -> QueryResult:
    """At most `limit` episodes of the evaluation after `iteration` (the newest when left out), in its order.

    `success`: only such; `after`: only those behind the one of this number. `rows` have their `prompt` and last
    `answer` in few words; `next` is the number to go on after, None where there is nothing further. Raises ReplayError
    for an evaluation of which none are kept.
    """
    with store.reading() as connection:
        made = evaluations(connection, run)
        asked = _asked(made, iteration)
        if asked is None:
            return {"run": run, "iteration": None, "evaluations": made, "rows": [], "next": None}
        query = sa.select(*_FACTS, *_SAID).where(episodes.c.run == run, episodes.c.iteration == asked)
        if success is not None:
            query = query.where(episodes.c.success == success)
        if after is not None:
            query = query.where(episodes.c.number > after)
        found = connection.execute(query.order_by(episodes.c.number).limit(limit + 1)).mappings().all()
    rows = [{**_facts(row), **_in_few_words(row)} for row in found[:limit]]
    return {
        "run": run,
        "iteration": asked,
        "evaluations": made,
        "rows": rows,
        "next": rows[-1]["number"] if len(found) > limit else None,
    }


def _asked(made: list[QueryResult], iteration: int | None) -> int | None:
    kept = [each["iteration"] for each in made]
    if iteration is None:
        return kept[-1] if kept else None
    if iteration not in kept:
        there = ", ".join(map(str, kept)) or "none"
        raise ReplayError(
            f"iteration must be one whose evaluation's episodes are kept ({there}), got {iteration}. "
            "evaluation.keep_episodes says how many are."
        )
    return iteration


def held_out_task(store: ReplayStore, run: str, task: str, *, limit: int = 100) -> QueryResult:
    """All kept episodes on one held-out task, oldest first, each with its `messages`: None where they are damaged.

    `task`: its hash, or the beginning of it. Raises ReplayError where that names none, or several.
    """
    with store.reading() as connection:
        begins = episodes.c.task.startswith(task, autoescape=True)
        named = sa.select(episodes.c.task).where(episodes.c.run == run, begins).distinct().limit(2)
        hashes = connection.scalars(named).all()
        if len(hashes) != 1:
            raise ReplayError(
                f"task must name one held-out task, got {task!r}, which fits {'several' if hashes else 'none'}. "
                "See: agentloop replay held-out"
            )
        query = sa.select(*_FACTS, *_SAID).where(episodes.c.run == run, episodes.c.task == hashes[0])
        ordered = query.order_by(episodes.c.iteration, episodes.c.number).limit(limit)
        found = connection.execute(ordered).mappings().all()
    return {"run": run, "task": hashes[0], "episodes": [{**_facts(row), "messages": _messages(row)} for row in found]}


def _facts(row: sa.RowMapping) -> QueryResult:
    return {name: row[name] for name in FACTS}


def _in_few_words(row: sa.RowMapping) -> QueryResult:
    try:
        return in_few_words(_said(row))
    except BlobError:
        return NONE


def _messages(row: sa.RowMapping) -> list[dict[str, Any]] | None:
    try:
        return [*map(plain_message, _said(row))]
    except BlobError:
        return None


def _said(row: sa.RowMapping) -> tuple[Message, ...]:
    return messages_of(*(row[name] for name in SAID))
