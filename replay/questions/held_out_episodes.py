"""Episodes of evaluations: those of one evaluation, and one task through all of them."""

from __future__ import annotations

import sqlalchemy as sa

from context.messages import Message, plain_message
from replay.errors import ReplayError
from replay.questions.filters.query import QueryResult
from replay.questions.trajectory import NONE, in_few_words
from replay.storage.collecting.never_drawn import FACTS, SAID
from replay.storage.format.encoding import BlobError
from replay.storage.format.rows import messages_of
from replay.storage.format.schema import held_out as episodes
from replay.store import ReplayStore

_QUERY = sa.select(*(episodes.c[name] for name in (*FACTS, *SAID)))


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

    `success`: only such; `after`: only those behind the episode of this number. Each of the `rows` has its `prompt` and
    last `answer` in few words; `next` is the number to go on after, None where there is nothing further. Raises
    ReplayError for an evaluation of which no episodes are kept.
    """
    with store.reading() as connection:
        made = _evaluations(connection, run)
        kept = [each["iteration"] for each in made]
        if iteration is None and not kept:
            return {"run": run, "iteration": None, "evaluations": made, "rows": [], "next": None}
        asked = kept[-1] if iteration is None else iteration
        if asked not in kept:
            raise ReplayError(
                f"iteration must be one whose evaluation's episodes are kept ({', '.join(map(str, kept)) or 'none'}), "
                f"got {asked}. evaluation.keep_episodes says how many are."
            )
        query = _QUERY.where(episodes.c.run == run, episodes.c.iteration == asked)
        query = query if success is None else query.where(episodes.c.success == success)
        query = query if after is None else query.where(episodes.c.number > after)
        found = connection.execute(query.order_by(episodes.c.number).limit(limit + 1)).mappings().all()
    kept = [(_facts(row), _said(row)) for row in found[:limit]]
    rows = [{**facts, **(NONE if said is None else in_few_words(said))} for facts, said in kept]
    following = rows[-1]["number"] if len(found) > limit else None
    return {"run": run, "iteration": asked, "evaluations": made, "rows": rows, "next": following}


def _evaluations(connection: sa.Connection, run: str) -> list[QueryResult]:
    """The evaluations of which episodes are kept, oldest first."""
    successes = sa.cast(sa.func.sum(sa.cast(episodes.c.success, sa.Integer)), sa.BigInteger)
    query = sa.select(
        episodes.c.iteration, sa.func.count().label("episodes"), sa.func.coalesce(successes, 0).label("successes")
    )
    mine = query.where(episodes.c.run == run).group_by(episodes.c.iteration).order_by(episodes.c.iteration)
    return [dict(row) for row in connection.execute(mine).mappings()]


def held_out_task(store: ReplayStore, run: str, task: str, *, limit: int = 100) -> QueryResult:
    """All kept episodes on one held-out task, oldest first, each with its `messages`: None where they are damaged.

    `task` is its hash, or the beginning of it. Raises ReplayError where that names none, or several.
    """
    with store.reading() as connection:
        begins = episodes.c.task.startswith(task, autoescape=True)
        named = sa.select(episodes.c.task).where(episodes.c.run == run, begins).distinct().limit(2)
        hashes = connection.scalars(named).all()
        if len(hashes) != 1:
            which = "several" if hashes else "none"
            raise ReplayError(f"task must name one held-out task, got {task!r}, which fits {which}.")
        query = _QUERY.where(episodes.c.run == run, episodes.c.task == hashes[0]).limit(limit)
        found = connection.execute(query.order_by(episodes.c.iteration, episodes.c.number)).mappings().all()
    kept = [(_facts(row), _said(row)) for row in found]
    shown = [{**facts, "messages": said and [*map(plain_message, said)]} for facts, said in kept]
    return {"run": run, "task": hashes[0], "episodes": shown}


def _facts(row: sa.RowMapping) -> QueryResult:
    return {name: row[name] for name in FACTS}


def _said(row: sa.RowMapping) -> tuple[Message, ...] | None:
    """None where the messages are damaged."""
    try:
        return messages_of(*(row[name] for name in SAID))
    except BlobError:
        return None
