"""The effect of replay: its share of updates, the success of tasks after it, and the tokens that drifted most."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from statistics import fmean
from typing import NamedTuple

import numpy as np
import sqlalchemy as sa

from replay.questions.filters.query import QueryResult, run_is
from replay.records import COMMITTED, FRESH, REPLAY
from replay.storage.format.encoding import BlobError, decode_log_probs
from replay.storage.format.rows import chunked
from replay.storage.format.schema import draws, groups, reclaimed, token_scores, trajectories
from replay.storage.format.views import COUNTS_AS_ATTEMPTS
from replay.storage.read import load
from replay.storage.statements import selected
from replay.store import ReplayStore

_REPLAYED = sa.func.count().filter(draws.c.stream == REPLAY).label("replayed")
_DRAWS = 1_000
"""Number of draws whose rows are candidates for the list of largest gaps."""
_SCORED = 1_000
"""Most scored rows that are read. Rows with the largest gaps in updates are read first."""


def stream_shares(store: ReplayStore, run: str) -> list[QueryResult]:
    """Return replay's share of each update: `rows` is its share of the batch's rows, `advantage` its share of the sum
    of |advantage x weight| over these rows.

    The second share measures how strongly rows push. It is not a share of the gradient, because it leaves out
    `replay.weight`, the number of tokens and the clip. None: the sum is 0.
    """
    push = sa.func.sum(sa.func.abs(draws.c.advantage * draws.c.weight))
    query = sa.select(draws.c.iteration, draws.c.stream, sa.func.count(), push)
    query = query.where(draws.c.run == run, draws.c.state == COMMITTED).group_by(draws.c.iteration, draws.c.stream)
    with store.reading() as connection:
        found = connection.execute(query.order_by(draws.c.iteration)).all()
    shares = []
    for iteration, streams in groupby(found, key=lambda row: row[0]):
        of = {stream: (rows, push or 0.0) for _, stream, rows, push in streams}
        (fresh, fresh_push), (replay, replay_push) = of.get(FRESH, (0, 0.0)), of.get(REPLAY, (0, 0.0))
        both = fresh_push + replay_push
        share = replay_push / both if both else None
        shares.append({"iteration": iteration, "rows": replay / (fresh + replay), "advantage": share})
    return shares


def after_replay(store: ReplayStore, run: str, *, newest: int = 500) -> list[QueryResult]:
    """Compare consecutive fresh groups of a task, by whether rows of the task were replayed between them.

    Only groups of the `newest` iterations are compared.

    The answer has a line for each combination of `before` and `replayed`. `before` says whether none, some or all of
    the earlier group succeeded, so that easy tasks are not compared with hard ones. A line has the number of `pairs` of
    groups, the share of pairs whose success was `better`, and the mean changes of `success` and `reward`.

    The numbers show what followed replay, not what it caused, because samplers choose tasks by their success. Updates
    that were made while the later group was collected count as made before it.
    """
    with store.reading() as connection:
        last = connection.scalar(sa.select(sa.func.max(groups.c.iteration)).where(groups.c.run == run)) or 0
        first = last - newest + 1
        attempts, replays = _attempts(connection, run, first), _replays(connection, run, first)
    changes: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for task, of_task in attempts.items():
        for earlier, later in pairwise(of_task):
            between = [bisect_left(replays.get(task, ()), at) for at in (earlier.iteration, later.iteration)]
            replayed = between[0] < between[1]
            change = later.success - earlier.success, later.reward - earlier.reward
            changes.setdefault((earlier.how_many_succeeded, replayed), []).append(change)
    return [
        {"before": before, "replayed": replayed, **_changes(changes.get((before, replayed), ()))}
        for before in ("none", "some", "all")
        for replayed in (True, False)
    ]


class _Attempt(NamedTuple):
    """The fresh groups of a task in one iteration, taken together."""

    iteration: int
    success: float
    """The share of successful members."""
    reward: float

    @property
    def how_many_succeeded(self) -> str:
        return "none" if self.success == 0 else "all" if self.success > 1 - 1e-9 else "some"


def _attempts(connection: sa.Connection, run: str, first: int) -> dict[str, list[_Attempt]]:
    """Return the attempts of each task, by its hash, in the order of iterations."""
    size = sa.func.sum(groups.c.size)
    means = (sa.func.sum(groups.c[name] * groups.c.size) / size for name in ("success_rate", "reward_mean"))
    query = sa.select(groups.c.task, groups.c.iteration, *means).where(groups.c.run == run, COUNTS_AS_ATTEMPTS)
    query = (
        query.where(groups.c.iteration >= first)
        .group_by(groups.c.task, groups.c.iteration)
        .order_by(groups.c.task, groups.c.iteration)
    )
    found: dict[str, list[_Attempt]] = {}
    for task, *facts in connection.execute(query):
        found.setdefault(task, []).append(_Attempt(*facts))
    return found


def _replays(connection: sa.Connection, run: str, first: int) -> dict[str, list[int]]:
    """Return the iterations whose updates replayed each task, by its hash, in order."""
    used = (draws.c.run == run) & (draws.c.state == COMMITTED) & (draws.c.stream == REPLAY)
    used &= draws.c.iteration >= first
    place, drawn = draws.c.iteration.label("iteration"), draws.c.trajectory
    stored = sa.select(trajectories.c.task, place).join_from(draws, trajectories, trajectories.c.id == drawn)
    gone = sa.select(groups.c.task, place).join_from(reclaimed, groups, groups.c.id == reclaimed.c.group)
    gone = gone.join(draws, drawn == reclaimed.c.id)
    found: dict[str, list[int]] = {}
    for task, iteration in connection.execute(sa.union_all(stored.where(used), gone.where(used))).all():
        found.setdefault(task, []).append(iteration)
    return {task: sorted(iterations) for task, iterations in found.items()}


def _changes(pairs: Sequence[tuple[float, float]]) -> QueryResult:
    """Summarise changes of success and reward as a line's numbers."""
    success, reward = zip(*pairs, strict=True) if pairs else ((), ())
    better, *means = (fmean(each) if pairs else None for each in ([one > 1e-9 for one in success], success, reward))
    return {"pairs": len(pairs), "better": better, "success": means[0], "reward": means[1]}


def token_gaps(store: ReplayStore, run: str | None = None, *, limit: int = 20) -> QueryResult:
    """List the largest differences between a token's log-prob when it was sampled and later, in either direction.

    Gaps are in nats. `rows` are the trajectories with the largest gap of a token in any update of the run (None: of all
    runs); the token itself is not stored. `tokens` are single tokens under the policy of `replay rescore`. They come
    from the `scored` rows that were read, out of `of_scored` rows with scores.
    """
    largest = sa.func.max(draws.c.token_gap_max)
    measured = (draws.c.state == COMMITTED) & draws.c.token_gap_max.is_not(None)
    by_row = sa.select(draws.c.trajectory, largest.label("gap"), _REPLAYED)
    by_row = by_row.where(measured, run_is(run, draws.c.run)).group_by(draws.c.trajectory)
    with store.reading() as connection:
        # The rows of the largest gaps of draws are looked up by an index; all rows would have to be put in groups.
        most = sa.select(draws.c.trajectory).where(measured, run_is(run, draws.c.run))
        found = by_row.where(draws.c.trajectory.in_(most.order_by(draws.c.token_gap_max.desc()).limit(_DRAWS)))
        rows = connection.execute(found.order_by(largest.desc(), draws.c.trajectory).limit(limit)).mappings()
        gaps = by_row.where(draws.c.trajectory.in_(sa.select(token_scores.c.trajectory))).subquery()
        scored = sa.select(token_scores.c.trajectory, sa.func.max(gaps.c.gap).label("gap"))
        scored = scored.join_from(token_scores, gaps, gaps.c.trajectory == token_scores.c.trajectory, isouter=True)
        scored = scored.where(run_is(run, token_scores.c.run)).group_by(token_scores.c.trajectory)
        known = sorted(connection.execute(scored).all(), key=lambda row: (-(row.gap or 0.0), row.trajectory))
        ids = [row.trajectory for row in known[:_SCORED]]
        tokens = [token for chunk in chunked(ids) for token in _gaps_of(connection, chunk, limit)]
        return {
            "run": run,
            "rows": [dict(row) for row in rows],
            "tokens": sorted(tokens, key=lambda each: (-each["gap"], each["trajectory"], each["token"]))[:limit],
            "scored": len(ids),
            "of_scored": len(known),
        }


def _gaps_of(connection: sa.Connection, ids: Sequence[str], limit: int) -> Iterator[QueryResult]:
    """Yield the largest gaps of the tokens of each row. Damaged rows and scores are left out."""
    whole = load(connection, ids, with_messages=False).whole
    for score in selected(connection, [*token_scores.c], token_scores.c.trajectory, list(whole)):
        behavior = whole[score.trajectory].segments[score.position].tokens.behavior_log_probs
        try:
            current = decode_log_probs(score.log_probs, len(behavior))
        except BlobError:
            continue
        gaps = np.nan_to_num(np.abs(current - behavior), nan=-1.0)
        place = {"trajectory": score.trajectory, "segment": score.position}
        for at in np.argsort(-gaps, kind="stable")[:limit].tolist():
            if gaps[at] >= 0:
                sampled, now = float(behavior[at]), float(current[at])
                yield {**place, "token": at, "gap": float(gaps[at]), "sampled": sampled, "now": now}
