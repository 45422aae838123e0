"""One iteration: its plan, every row that its update used, and its metrics. Also the episodes of evaluations."""

import math
from collections.abc import Sequence

import sqlalchemy as sa

from context.messages import Message, plain_message
from replay.errors import ReplayError
from replay.questions.filters.query import QueryResult, RowCondition, find_one
from replay.questions.summary import total
from replay.questions.trajectory import opening, shorten_conversations
from replay.records import COMMITTED, REMOVED_TASK
from replay.storage.collecting.never_drawn import FACTS, SAID
from replay.storage.format.rows import readable_messages
from replay.storage.format.schema import draws, groups, iterations, metrics, policies, tasks
from replay.storage.format.schema import held_out as episodes
from replay.storage.statements import selected
from replay.storage.tombstones import COLLECTED, IS_KNOWN, with_collected
from replay.store import ReplayStore


def iteration(store: ReplayStore, run: str, number: int) -> QueryResult:
    """Return what one update learned from, its metrics, its policy (None: not published), and adjacent iterations."""
    with store.reading() as connection:
        record = find_iteration(connection, run, number)
        rows = _committed_draws(connection, run, number)
        newest = sa.select(sa.func.max(iterations.c.iteration)).where(iterations.c.run == run)
        last = connection.scalar(newest) or number
        same = (policies.c.run == run) & (policies.c.version == record["makes_policy_version"])
        policy = connection.execute(sa.select(policies.c.version, policies.c.checkpoint).where(same)).mappings()
        here = (metrics.c.run == run) & (metrics.c.iteration == number)
        measured = connection.execute(sa.select(metrics.c.name, metrics.c.value).where(here).order_by(metrics.c.name))
        return {
            **record,
            "previous": number - 1 if number > 1 else None,
            "next": number + 1 if number < last else None,
            "last": last,
            "policy": next(map(dict, policy), None),
            "trajectories": rows,
            "groups": _groups(connection, rows),
            "metrics": {name: value if math.isfinite(value or 0.0) else None for name, value in measured},
        }


def find_iteration(connection: sa.Connection, run: str, number: int) -> QueryResult:
    """Return the record of an iteration. Raises ReplayError if the iteration has not been committed."""
    mine = iterations.c.run == run
    query = sa.select(iterations).where(mine, iterations.c.iteration == number)
    found = connection.execute(query).mappings().one_or_none()
    if found is None:
        last = connection.scalar(sa.select(sa.func.max(iterations.c.iteration)).where(mine)) or 0
        raise ReplayError(f"iteration must be a committed one, from 1 to {last}, got {number}.")
    return {**found, "makes_policy_version": found["policy_version"] + 1}


def _committed_draws(connection: sa.Connection, run: str, number: int) -> list[QueryResult]:
    """List the draws that an iteration's updates used, with facts about the collection of each row."""
    query = (
        sa.select(draws, *COLLECTED)
        .select_from(with_collected(draws, draws.c.trajectory))
        .where(draws.c.run == run, draws.c.state == COMMITTED, draws.c.iteration == number, IS_KNOWN)
        .order_by(draws.c.slot)
    )
    # Both tables have a `state`. The row's comes last and stays, since all of these draws are committed.
    names = [str(column.key) for column in (*draws.c, *COLLECTED)]
    return [dict(zip(names, row, strict=True)) for row in connection.execute(query)]


def _groups(connection: sa.Connection, rows: Sequence[QueryResult]) -> list[QueryResult]:
    """List the groups of the rows, in the order of their first slots.

    `degenerate`: the group had nothing to compare when it was collected. `teaches`: one of its rows had an advantage
    in the update. A degenerate group can teach too, by another baseline.
    """
    members: dict[str, list[QueryResult]] = {}
    for row in rows:
        members.setdefault(row["group"], []).append(row)
    found = {group.id: dict(group._mapping) for group in selected(connection, [*groups.c], groups.c.id, list(members))}
    return [
        {
            **found[id],
            "stream": of_group[0]["stream"],
            "slots": [row["slot"] for row in of_group],
            "degenerate": found[id]["size"] < 2 or found[id]["reward_std"] == 0.0,
            "teaches": any(_advantage(row) for row in of_group),
        }
        for id, of_group in members.items()
    ]


def _advantage(row: QueryResult) -> float:
    """The row's advantage in the update, or when it was collected where the trainer stored no other."""
    return float(row["stored_advantage"] if row["advantage"] is None else row["advantage"])


_QUERY = sa.select(*(episodes.c[name] for name in (*FACTS, *SAID)))


def held_out(
    store: ReplayStore,
    run: str,
    iteration: int | None = None,
    *,
    success: bool | None = None,
    which: RowCondition | None = None,
    after: int | None = None,
    limit: int = 50,
) -> QueryResult:
    """List at most `limit` episodes of the evaluation after `iteration` (None: the newest), in their order.

    `success` lists only successful or only failed episodes, `which` only those of a condition, `after` only those that
    come after this number. Each of the `rows` has a short `prompt` and a short last `answer`. `next` is the `after` of
    the following page; None: there is none. Raises ReplayError for an evaluation whose episodes are not kept.
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
                f"got {asked}. evaluation.keep_episodes sets for how many evaluations they are."
            )
        query = _QUERY.where(episodes.c.run == run, episodes.c.iteration == asked)
        query = query if success is None else query.where(episodes.c.success == success)
        query = query if which is None else query.where(which)
        query = query if after is None else query.where(episodes.c.number > after)
        found = connection.execute(query.order_by(episodes.c.number).limit(limit + 1)).mappings().all()
    facts, said = zip(*map(_split_row, found[:limit]), strict=True) if found else ((), ())
    rows = [{**each, **short} for each, short in zip(facts, shorten_conversations(said), strict=True)]
    following = rows[-1]["number"] if len(found) > limit else None
    return {"run": run, "iteration": asked, "evaluations": made, "rows": rows, "next": following}


def _evaluations(connection: sa.Connection, run: str) -> list[QueryResult]:
    """List the evaluations whose episodes are kept, oldest first."""
    successes = total(sa.cast(episodes.c.success, sa.Integer)).label("successes")
    query = sa.select(episodes.c.iteration, sa.func.count().label("episodes"), successes)
    mine = query.where(episodes.c.run == run).group_by(episodes.c.iteration).order_by(episodes.c.iteration)
    return [dict(row) for row in connection.execute(mine).mappings()]


def held_out_task(store: ReplayStore, run: str, task: str, *, limit: int = 100) -> QueryResult:
    """List kept episodes of the held-out task whose hash begins with `task`, oldest first, with its `payload` as JSON.

    Damaged messages are None. The first `asked` messages come before the policy's first reply.
    """
    with store.reading() as connection:
        named = sa.select(episodes.c.task).where(episodes.c.run == run).distinct()
        of, advice = "held-out task's hash", "The list of held-out episodes has the hashes."
        hash = find_one(connection, task, named, name="task", of=of, advice=advice)
        query = _QUERY.where(episodes.c.run == run, episodes.c.task == hash).limit(limit)
        found = connection.execute(query.order_by(episodes.c.iteration, episodes.c.number)).mappings().all()
        known = sa.select(tasks.c.payload).where(tasks.c.hash == hash, tasks.c.payload != REMOVED_TASK)
        payload = connection.scalar(known)
    shown = [
        {**facts, "messages": said and [*map(plain_message, said)], "asked": len([*opening(said or ())])}
        for facts, said in map(_split_row, found)
    ]
    return {"run": run, "task": hash, "payload": payload, "episodes": shown}


def _split_row(row: sa.RowMapping) -> tuple[QueryResult, tuple[Message, ...] | None]:
    """Split a row into the facts of an episode and its messages. None: the messages are damaged."""
    return {name: row[name] for name in FACTS}, readable_messages(*(row[name] for name in SAID))
