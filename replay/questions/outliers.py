"""Episodes that stand out by their reward or their length, and rows with equal tokens."""

import hashlib
from collections import Counter

import sqlalchemy as sa

from replay.questions.filters.query import QueryResult, run_is
from replay.records import COMMITTED, REPLAY
from replay.storage.format.encoding import BlobError, decode_tokens
from replay.storage.format.schema import draws, groups, nodes, segments, trajectories
from replay.storage.format.views import IS_EPISODE
from replay.store import ReplayStore

_rows = trajectories.c
_FAR, _LEAST_OTHERS = 3.0, 3
_SHORT, _LEAST_SUCCESSES = 0.5, 20
_FACTS = [_rows[name] for name in ("id", "iteration", "reward", "num_action_tokens")]


def outliers(store: ReplayStore, run: str, *, limit: int = 20) -> QueryResult:
    """List episodes of a run that stand out. Read them: they may have found a loophole of the reward.

    `far` has rewards whose `gap` to the mean of their task's `others` is at least 3 standard deviations of all rewards
    of the run, if there are 3 others. The largest gaps come first. Where rewards have two values only, as 0 and 1, none
    is far. `short` has successes with less than half of the
    sampled tokens of every success of earlier iterations (`shortest_before`), if there were 20.
    """
    with store.reading() as connection:
        return {"run": run, "far": _far(connection, run, limit), "short": _short(connection, run)[:limit]}


def _far(connection: sa.Connection, run: str, limit: int) -> list[QueryResult]:
    mine = (_rows.run == run) & IS_EPISODE
    if len(connection.scalars(sa.select(_rows.reward).where(mine).distinct().limit(3)).all()) < 3:
        return []
    size, mean, std = groups.c.size, groups.c.reward_mean, groups.c.reward_std
    number, total = (sa.func.sum(each, type_=sa.Double) for each in (size * 1.0, size * mean))
    squares = sa.func.sum(size * (mean * mean + std * std), type_=sa.Double)
    sums = sa.select(number, total, squares).where(groups.c.run == run)
    count, added, squared = (value or 0.0 for value in connection.execute(sums).one())
    variance = max(squared / count - (added / count) ** 2, 0.0) if count else 0.0
    by_task = sa.select(groups.c.task, number.label("number"), total.label("total")).where(groups.c.run == run)
    of_task = by_task.group_by(groups.c.task).subquery().c
    others = of_task.number - 1
    gap = _rows.reward - (of_task.total - _rows.reward) / others
    # The task is read of the group: an index has all other facts of rows.
    query = sa.select(*_FACTS, groups.c.task, sa.cast(others, sa.BigInteger).label("others"), gap.label("gap"))
    query = query.join_from(trajectories, groups, groups.c.id == _rows.group)
    query = query.join(of_task.task.table, of_task.task == groups.c.task)
    query = query.where(mine, others >= _LEAST_OTHERS, gap * gap >= _FAR**2 * variance)
    # Without any spread, a gap is what rounding left.
    query = query.where(sa.literal(variance > 1e-12))
    return [
        dict(row)
        for row in connection.execute(query.order_by(sa.func.abs(gap).desc(), _rows.id).limit(limit)).mappings()
    ]


def _short(connection: sa.Connection, run: str) -> list[QueryResult]:
    solved, length = (_rows.run == run) & IS_EPISODE & _rows.success, _rows.num_action_tokens
    shortest = sa.select(_rows.iteration, sa.func.min(length), sa.func.count()).where(solved)
    found: list[QueryResult] = []
    before, count = 0, 0
    for iteration, least, successes in connection.execute(shortest.group_by(_rows.iteration).order_by("iteration")):
        if count >= _LEAST_SUCCESSES and least < _SHORT * before:
            query = sa.select(*_FACTS, _rows.task).where(solved, _rows.iteration == iteration, length < _SHORT * before)
            rows = connection.execute(query.order_by(length, _rows.id)).mappings()
            found += [{**row, "shortest_before": before} for row in rows]
        before, count = min(before or least, least), count + successes
    return found


def duplicates(store: ReplayStore, run: str | None = None) -> QueryResult:
    """Count the `different` token sequences of the stored `rows` of a run (None: of all), and of the rows in `replays`.

    Rows are equal if they have the same token ids in all segments; `most_stored` counts the rows of one token sequence.
    `replays` counts draws that updates used, of `rows_replayed` rows with `different_replayed` token sequences, and
    `most_used` the draws of one token sequence. Rows without tokens are left out.
    """
    uses = sa.select(draws.c.trajectory, sa.func.count()).where(draws.c.state == COMMITTED, draws.c.stream == REPLAY)
    uses = uses.where(run_is(run, draws.c.run)).group_by(draws.c.trajectory)
    drawn = sa.select(uses.subquery().c.trajectory)
    with store.reading() as connection:
        digests = _digests(connection, run_is(run, _rows.run) | _rows.id.in_(drawn))
        own = connection.scalars(sa.select(_rows.id).where(run_is(run, _rows.run))).all()
        used = connection.execute(uses).all()
    stored = Counter(digests[id] for id in own if id in digests)
    replays: Counter[bytes | str] = Counter()
    for id, count in used:
        replays.update({digests[id]: count} if id in digests else {})
    return {
        "rows": stored.total(),
        "different": len(stored),
        "most_stored": max(stored.values(), default=0),
        "replays": replays.total(),
        "rows_replayed": sum(id in digests for id, _ in used),
        "different_replayed": len(replays),
        "most_used": max(replays.values(), default=0),
    }


def _digests(connection: sa.Connection, chosen: sa.ColumnElement[bool]) -> dict[str, bytes | str]:
    """Return a digest of the token ids of each chosen row, by its id. Rows without readable tokens have none.

    Tokens are read only of rows that share their lengths with another one: any other row's own id is its digest.
    """
    lengths = (_rows.num_tokens, _rows.num_action_tokens, _rows.longest_segment)
    alike = sa.func.count().over(partition_by=lengths).label("alike")
    rows = sa.select(_rows.id, alike).where(chosen, _rows.segments_checksum.is_not(None)).subquery().c
    found: dict[str, bytes | str] = {id: id for id in connection.scalars(sa.select(rows.id).where(rows.alike == 1))}
    damaged = set()
    for table, place in ((segments, segments.c.position), (nodes, nodes.c.number)):
        query = sa.select(table.c.trajectory, table.c.num_tokens, table.c.tokens).where(rows.alike > 1)
        query = query.join(rows.id.table, rows.id == table.c.trajectory).order_by(table.c.trajectory, place)
        for id, count, blob in connection.execute(query):
            try:
                ids = decode_tokens(blob, count).token_ids.tobytes()
            except BlobError:
                damaged.add(id)
                continue
            found[id] = hashlib.sha256(found.get(id, b"") + count.to_bytes(8) + ids).digest()
    return {id: digest for id, digest in found.items() if id not in damaged}
