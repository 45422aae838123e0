"""Failed episodes compared with successful ones, to show what failures have in common."""

from collections import Counter
from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from replay.questions.filters import condition
from replay.questions.filters.query import QueryResult, run_is
from replay.storage.format import schema
from replay.storage.format.views import IS_EPISODE
from replay.store import ReplayStore

_rows = schema.trajectories.c
FAILED, SUCCESSFUL = "failed", "successful"
_OUTCOMES = {False: FAILED, True: SUCCESSFUL}
_MEANS = ("num_turns", "num_tool_calls", "num_tokens", "num_action_tokens", "reward")

_Counts = Mapping[str, Counter[str]]
"""Counts by name, by outcome."""


def outcomes(store: ReplayStore, run: str | None = None, filters: Sequence[str] = ()) -> QueryResult:
    """Compare the failed and the successful episodes of a run (None: of all) that all filters hold for.

    `episodes` counts the episodes of each outcome, and `means` has their means. `stop_reasons` and `error_kinds` have
    the share of each outcome's episodes with that reason, or with at least one failed tool call of that kind. Rows that
    a resume undid are left out, and hindsight.
    """
    mine = sa.and_(run_is(run, _rows.run), IS_EPISODE, *map(condition, filters))
    reasons, kinds, sums = ({FAILED: Counter[str](), SUCCESSFUL: Counter[str]()} for _ in range(3))
    with store.reading() as connection:
        columns = (sa.func.sum(sa.cast(_rows[name], sa.Double)).label(name) for name in _MEANS)
        query = sa.select(_rows.stop_reason, _rows.success, sa.func.count().label("episodes"), *columns).where(mine)
        for row in connection.execute(query.group_by(_rows.stop_reason, _rows.success)).mappings():
            outcome = _OUTCOMES[row["success"]]
            reasons[outcome][row["stop_reason"]] += row["episodes"]
            sums[outcome].update({name: row[name] for name in _MEANS})
        errors = sa.select(_rows.error_kinds, _rows.success, sa.func.count()).where(
            mine, _rows.error_kinds.is_not(None)
        )
        for words, success, episodes in connection.execute(errors.group_by(_rows.error_kinds, _rows.success)):
            kinds[_OUTCOMES[success]].update(dict.fromkeys(words.split(), episodes))
    episodes = {name: counts.total() for name, counts in reasons.items()}
    return {
        "run": run,
        "filters": list(filters),
        "episodes": episodes,
        "means": [_by_episode(name, sums, episodes) for name in _MEANS],
        "stop_reasons": _shares(reasons, episodes),
        "error_kinds": _shares(kinds, episodes),
    }


def _by_episode(name: str, sums: _Counts, episodes: Mapping[str, int]) -> QueryResult:
    return {"name": name, **{each: sums[each][name] / count if count else None for each, count in episodes.items()}}


def _shares(counts: _Counts, episodes: Mapping[str, int]) -> list[QueryResult]:
    """Return the share of each outcome's episodes by name. Names that set failures apart most come first."""
    names = sorted({name for each in counts.values() for name in each})
    found = [_by_episode(name, counts, episodes) for name in names]
    return sorted(found, key=lambda row: (row[SUCCESSFUL] or 0.0) - (row[FAILED] or 0.0))
