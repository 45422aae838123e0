"""Comparison of several runs: their numbers, their configurations, and the success of their tasks."""

from collections.abc import Sequence
from typing import Any

from replay.questions import QueryResult, summary
from replay.store import ReplayStore


def run_facts(store: ReplayStore, run: str) -> dict[str, QueryResult]:
    """Return the `numbers` of a run's summary and its `config`, both with flattened keys."""
    numbers = _flat(summary(store, run))
    del numbers["database"]
    return {"numbers": numbers, "config": _flat(dict(store.run(run).config))}


def task_success(each: Sequence[QueryResult], limit: int) -> QueryResult:
    """Compare the answers of `questions.task_success` for several runs.

    `tasks` counts the tasks that at least two runs tried. `rows` has the first `limit` of them by hash, with one entry
    a run (None: not tried). Tasks whose latest success differs most come first.
    """
    rows = side_by_side(each)
    latest = {hash: [one["latest_success"] for one in row if one] for hash, row in rows.items()}
    shared = [hash for hash in rows if len(latest[hash]) > 1]
    shared.sort(key=lambda hash: (min(latest[hash]) - max(latest[hash]), hash))
    return {"tasks": len(shared), "rows": {hash: rows[hash] for hash in shared[:limit]}}


def side_by_side(each: Sequence[QueryResult]) -> dict[str, list[Any]]:
    """Return the values of each name, one for each answer. None: the answer lacks the name."""
    return {name: [values.get(name) for values in each] for name in dict.fromkeys(name for one in each for name in one)}


def _flat(answer: QueryResult, prefix: str = "") -> QueryResult:
    flat: QueryResult = {}
    for name, value in answer.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
