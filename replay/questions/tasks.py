"""One task: its attempts over time and its stored rows. Also the list of all tasks."""

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import groupby
from typing import Any

import sqlalchemy as sa

from context.messages import Message
from replay.questions.filters.query import QueryResult, find_one, run_is
from replay.questions.summary import mean, total
from replay.questions.trajectory import opening, question_in, shorten_conversations
from replay.records import COMMITTED, ELIGIBLE, ORPHANED, REMOVED_TASK, REPLAY
from replay.sampling.samplers import successes
from replay.storage.format import schema
from replay.storage.format.rows import chunked, readable_messages
from replay.storage.format.schema import draws, groups, iterations, messages, tasks
from replay.storage.format.views import COUNTS_AS_ATTEMPTS, WITHOUT_SIGNAL
from replay.storage.statements import selected
from replay.storage.tombstones import with_collected
from replay.store import ReplayStore

_rows = schema.trajectories.c
_MOST_GROUPS = 200
"""Most groups that are listed, the newest first. All groups count in the totals."""
_MOST_VALUES, _LONGEST_VALUE = 4, 24
"""Most values of a payload in a list, and most characters of one with its name."""
_LISTED = (
    *(_rows[name] for name in ("id", "run", "iteration", "slot", "member", "policy_version_min", "reward", "success")),
    *(_rows[name] for name in ("advantage", "num_turns", "num_tokens", "stop_reason", "error_kinds", "state")),
    _rows.uses,
    _rows.group.label("group"),
)


_TRIED = _rows.state != ORPHANED
"""Excludes attempts of undone iterations, which are listed with their state but not counted."""
_COUNTS = (
    sa.func.count().label("attempts"),
    total(sa.cast(_rows.success, sa.Integer)).label("successes"),
    sa.func.avg(_rows.reward).label("reward_mean"),
)


def task(store: ReplayStore, hash_prefix: str, run: str | None = None, *, limit: int = 50) -> QueryResult:
    """Return the facts about one task, in one run (None: in all). `hash_prefix` is the beginning of its hash.

    Attempts are the members of the task's groups when they were collected; groups that a resume undid do not count.
    `versions` has the success of stored rows by policy. `trajectories` are the newest `limit` rows, and `more` says
    whether there are others.
    """
    with store.reading() as connection:
        found = _find(connection, hash_prefix, store.url)
        mine = _rows.task == found["hash"]
        if run is not None:
            # An expression keeps the database from using the index of the run, which has more rows than the task.
            mine = mine & (_rows.run.concat("") == run)
        tried = _groups_of(connection, found["hash"], run, mine)
        rows = connection.execute(sa.select(*_LISTED).where(mine).order_by(*_NEWEST_FIRST).limit(limit + 1))
        listed = [dict(row) for row in rows.mappings()]
        return {
            **found,
            "run": run,
            "prompt": _prompt(connection, mine),
            **_totals(tried),
            "orphaned": connection.scalar(sa.select(sa.func.count()).where(mine, ~_TRIED)) or 0,
            "versions": _versions(connection, mine),
            "groups_in_all": len(tried),
            "groups": tried[:_MOST_GROUPS],
            "trajectories": listed[:limit],
            "more": len(listed) > limit,
        }


def _find(connection: sa.Connection, hash_prefix: str, url: str) -> QueryResult:
    of, advice = f"task's hash in {url}", "See: agentloop replay ls --json"
    hash = find_one(connection, hash_prefix, sa.select(tasks.c.hash), name="HASH", of=of, advice=advice)
    row = connection.execute(sa.select(tasks).where(tasks.c.hash == hash)).mappings().one()
    removed = row["payload"] == REMOVED_TASK
    return {**row, "payload": None if removed else json.loads(row["payload"]), "removed": removed}


def _totals(tried: Sequence[QueryResult]) -> QueryResult:
    attempts = sum(group["size"] for group in tried)
    times = [group["iteration"] for group in tried]
    return {
        "attempts": attempts,
        "reward_mean": sum(group["size"] * group["reward_mean"] for group in tried) / attempts if attempts else None,
        "first_iteration": min(times, default=None),
        "latest_iteration": max(times, default=None),
        "runs": len({group["run"] for group in tried}),
        **{name: sum(group[name] for group in tried) for name in ("successes", "eligible", "replayed")},
    }


def _prompt(connection: sa.Connection, mine: sa.ColumnElement[bool]) -> list[QueryResult] | None:
    """Return the messages before the first reply, from the newest attempt that still has messages."""
    columns = (messages.c.num_messages, messages.c.said, messages.c.checksum)
    query = sa.select(*columns).join_from(schema.trajectories, messages, _rows.id == messages.c.trajectory).where(mine)
    row = connection.execute(query.order_by(*_NEWEST_FIRST).limit(1)).one_or_none()
    said = row and readable_messages(*row)
    if said is None:
        return None
    return [{"author": each.author, "role": each.role, "content": each.content} for each in opening(said)]


def _versions(connection: sa.Connection, mine: sa.ColumnElement[bool]) -> list[QueryResult]:
    """Return the task's success by run and policy version."""
    version = _rows.policy_version_min
    query = sa.select(_rows.run, version.label("version"), *_COUNTS).where(mine, _TRIED).group_by(_rows.run, version)
    return [dict(row) for row in connection.execute(query.order_by(_rows.run, version)).mappings()]


_NEWEST_FIRST = (_rows.iteration.desc(), _rows.run, _rows.slot, _rows.id)
_GROUP = ("id", "run", "iteration", "size", "reward_mean", "reward_std", "success_rate")
# Not every group's iteration is a committed one: an import's was in another database, a live run's newest is under way.
_MADE = (
    sa.exists()
    .where(iterations.c.run == groups.c.run, iterations.c.iteration == groups.c.iteration)
    .correlate(groups)
    .label("committed")
)


def _groups_of(
    connection: sa.Connection, task: str, run: str | None, mine: sa.ColumnElement[bool]
) -> list[QueryResult]:
    """List the task's groups, the newest first. `mine` is the condition for its stored rows."""
    drawable = dict(map(tuple, connection.execute(_by_group(mine, _rows.state == ELIGIBLE))))
    used = _by_group(mine, draws.c.state == COMMITTED, draws.c.stream == REPLAY)
    replayed = dict(map(tuple, connection.execute(used.join(draws, draws.c.trajectory == _rows.id))))
    query = sa.select(*(groups.c[name] for name in _GROUP), _MADE)
    query = query.where(groups.c.task == task, COUNTS_AS_ATTEMPTS, run_is(run, groups.c.run))
    order = (groups.c.iteration.desc(), groups.c.run, groups.c.id)
    return [
        {
            **row,
            "committed": bool(row["committed"]),
            "successes": int(successes(row["success_rate"], row["size"])),
            "eligible": drawable.get(row["id"], 0),
            "replayed": replayed.get(row["id"], 0),
        }
        for row in connection.execute(query.order_by(*order)).mappings()
    ]


def _by_group(*conditions: sa.ColumnElement[bool]) -> sa.Select[Any]:
    query = sa.select(_rows.group, sa.func.count()).select_from(schema.trajectories)
    return query.where(*conditions).group_by(_rows.group)


class TaskSort(StrEnum):
    """The orders of the list of tasks. The greatest values come first."""

    unsolved = "unsolved"
    """Tasks of the lowest success rate come first. Of equal ones, the most tried come first."""
    replayed = "replayed"
    drift = "drift"
    attempts = "attempts"
    last = "last"
    first_success = "first_success"
    latest_success = "latest_success"
    best_success = "best_success"
    trend = "trend"
    groups_without_signal = "groups_without_signal"


def task_list(
    store: ReplayStore,
    run: str | None = None,
    *,
    sort: TaskSort = TaskSort.unsolved,
    ascending: bool = False,
    limit: int = 50,
) -> QueryResult:
    """List `limit` tasks in order; `tasks` counts all that were tried, `never_solved` those without a success.

    Attempts are counted as in `questions.task`. `first_success`, `latest_success` and `best_success` are success rates
    of groups; of several groups in one iteration, the first counts, as in `v_tasks`. `trend` is the latest minus the
    first rate; None: only one iteration tried the task. `course` has [iteration, rate] of the newest iterations.
    `groups_without_signal` counts groups of equal rewards among all `num_groups`. `replayed` counts draws of the task's
    rows that updates used, evicted rows included, with their mean drift and their largest gap. `latest_iteration` is
    the newest iteration that tried the task.
    """
    with store.reading() as connection:
        found = _tried_tasks(connection, run)
        rows = sorted(found.values(), key=lambda row: _sort_key(row, sort, ascending))
        shown = _add_names(connection, rows[:limit], run)
    return {
        "run": run,
        "sort": sort.value,
        "tasks": len(rows),
        "never_solved": sum(row["successes"] == 0 for row in rows),
        "rows": shown,
    }


def task_success(store: ReplayStore, run: str) -> dict[str, QueryResult]:
    """Return the success of every task of a run, by its hash, as in `task_list`."""
    with store.reading() as connection:
        return _task_outcomes(connection, run)


def task_prompts(store: ReplayStore, run: str, hashes: Sequence[str]) -> dict[str, str | None]:
    """Return the short prompt of each task's newest stored attempt in a run, by its hash. None: there is none."""
    with store.reading() as connection:
        return {row["hash"]: row["prompt"] for row in _add_names(connection, [{"hash": hash} for hash in hashes], run)}


def _sort_key(row: Mapping[str, Any], sort: TaskSort, ascending: bool) -> tuple[Any, ...]:
    """Return the key that sorts a row. Unknown values come last in both directions."""
    sign = 1 if ascending else -1
    if sort is TaskSort.unsolved:
        return -sign * row["successes"] / row["attempts"], sign * row["attempts"], row["hash"]
    names = _COLUMNS.get(sort, (sort.value, "attempts"))
    return (*((row[name] is None, sign * (row[name] or 0)) for name in names), row["hash"])


_COLUMNS = {TaskSort.drift: ("row_drift_mean", "token_gap_max"), TaskSort.last: ("latest_iteration", "attempts")}
"""Columns of the orders that are not named like their column. Ties go to the most tried task."""
_UNREPLAYED: QueryResult = {"replayed": 0, "row_drift_mean": None, "token_gap_max": None}
_MOST_POINTS = 32
"""Most iterations of a task's course. The newest ones are kept."""


def _task_outcomes(connection: sa.Connection, run: str | None) -> dict[str, QueryResult]:
    """Return the success of every task that was tried, by its hash."""
    columns = (groups.c.task, groups.c.iteration, groups.c.size, groups.c.success_rate, WITHOUT_SIGNAL)
    query = sa.select(*columns).where(COUNTS_AS_ATTEMPTS, run_is(run, groups.c.run))
    found = {}
    for hash, of_task in groupby(
        connection.execute(query.order_by(groups.c.task, groups.c.iteration, groups.c.id)), key=lambda row: row[0]
    ):
        _, iterations, sizes, rates, flat = zip(*of_task, strict=True)
        course: dict[int, float] = {}
        for iteration, rate in zip(iterations, rates, strict=True):
            course.setdefault(iteration, rate)
        first, *_, latest = [rates[0], *course.values()]
        found[hash] = {
            "hash": hash,
            "attempts": sum(sizes),
            "successes": sum(int(successes(rate, size)) for rate, size in zip(rates, sizes, strict=True)),
            "latest_iteration": iterations[-1],
            "first_success": first,
            "latest_success": latest,
            "best_success": max(rates),
            "trend": latest - first if len(course) > 1 else None,
            "course": [*map(list, course.items())][-_MOST_POINTS:],
            "num_groups": len(sizes),
            "groups_without_signal": sum(map(bool, flat)),
        }
    return found


def _tried_tasks(connection: sa.Connection, run: str | None) -> dict[str, QueryResult]:
    """Return every task that was tried, by its hash, with the replays of its rows."""
    used = (draws.c.state == COMMITTED) & (draws.c.stream == REPLAY) & groups.c.task.is_not(None)
    drawn = sa.select(
        groups.c.task.label("hash"),
        sa.func.count().label("replayed"),
        mean(draws.c.drift_mean).label("row_drift_mean"),
        sa.func.max(draws.c.token_gap_max).label("token_gap_max"),
    ).select_from(with_collected(draws, draws.c.trajectory))
    drawn = drawn.where(used, run_is(run, groups.c.run)).group_by(groups.c.task)
    replays = {row["hash"]: row for row in connection.execute(drawn).mappings()}
    return {hash: {**row, **replays.get(hash, _UNREPLAYED)} for hash, row in _task_outcomes(connection, run).items()}


def task_questions(connection: sa.Connection, hashes: Sequence[str]) -> list[str | None]:
    """Return the question of each task. None: its newest attempt has no messages."""
    said = _newest_conversations(connection, hashes, None)
    asked = (question_in(said.get(hash) or ()) for hash in hashes)
    return [None if message is None else message.content for message in asked]


def _add_names(connection: sa.Connection, rows: Sequence[QueryResult], run: str | None) -> list[QueryResult]:
    """Add the environment of each task, short values of its payload, and the prompt of its newest stored attempt."""
    hashes = [row["hash"] for row in rows]
    stored = {row.hash: row for row in selected(connection, [*tasks.c], tasks.c.hash, hashes)}
    said = _newest_conversations(connection, hashes, run)
    for row, short in zip(rows, shorten_conversations([said.get(hash) for hash in hashes]), strict=True):
        environment, payload = stored[row["hash"]].environment, stored[row["hash"]].payload
        row |= {"environment": environment, "facts": short_values(payload), "prompt": short["prompt"]}
    return list(rows)


def short_values(payload: str) -> str:
    """Write some short values of a task's stored payload, as in `hops 5, code 71`."""
    fields = {} if payload == REMOVED_TASK else json.loads(payload)
    values = (f"{name} {value}" for name, value in fields.items() if isinstance(value, int | float | str))
    return ", ".join([text for text in values if len(text) <= _LONGEST_VALUE][:_MOST_VALUES])


def _newest_conversations(
    connection: sa.Connection, hashes: Sequence[str], run: str | None
) -> dict[str, Sequence[Message] | None]:
    """Return the messages of an attempt of each task's newest group that has stored rows, by hash."""
    stored = sa.exists().where(_rows.group == groups.c.id, _TRIED)
    newest = sa.select(groups.c.id).where(groups.c.task == tasks.c.hash, run_is(run, groups.c.run), stored)
    newest = newest.order_by(groups.c.iteration.desc(), groups.c.id).limit(1)
    columns = (messages.c.num_messages, messages.c.said, messages.c.checksum)
    found: dict[str, Sequence[Message] | None] = {}
    for chunk in chunked(hashes):
        of = sa.select(newest.scalar_subquery()).where(tasks.c.hash.in_(chunk))
        one = sa.select(sa.func.min(_rows.id)).where(_rows.group.in_(of), _TRIED).group_by(_rows.task)
        query = sa.select(_rows.task, *columns).join_from(schema.trajectories, messages).where(_rows.id.in_(one))
        found |= {task: readable_messages(*said) for task, *said in connection.execute(query)}
    return found
