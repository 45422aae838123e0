"""Several trajectories token by token; and several runs by their numbers and configurations."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from context.authors import AuthorTable
from context.tokens.token_sequence import TokenSequence
from replay.questions import QueryResult, find, summary
from replay.questions.trajectory import record_of
from replay.storage.read import author_table, load
from replay.store import ReplayStore


def readable(store: ReplayStore, ids: Sequence[str]) -> list[str]:
    """Those of the trajectories that `trajectories` can compare: neither damaged nor without their tokens."""
    with store.reading() as connection:
        whole = load(connection, ids).whole
    return [id for id in ids if id in whole]


def trajectories(store: ReplayStore, id_prefixes: Sequence[str]) -> QueryResult:
    """Their records side by side, and where tokens and messages part; ContentGone where tokens are stored no more."""
    ids = [find(store, prefix) for prefix in id_prefixes]
    with store.reading() as connection:
        found = load(connection, ids).in_order(ids)
        tables = [author_table(connection, row.record.run) for row in found]
    records = side_by_side([record_of(row) for row in found])
    segments = [
        _segment(position, parts, tables)
        for position, parts in enumerate(zip_longest(*([s.tokens for s in row.segments] for row in found)))
    ]
    said = zip_longest(*(row.messages for row in found))
    return {
        "ids": ids,
        "records": records,
        "different": [name for name, values in records.items() if any(value != values[0] for value in values)],
        "segments": segments,
        "same_tokens": not any(part["differs"] for part in segments),
        "first_different_message": next(
            (place for place, each in enumerate(said) if any(message != each[0] for message in each)), None
        ),
    }


def _segment(position: int, parts: Sequence[TokenSequence | None], tables: Sequence[AuthorTable]) -> QueryResult:
    """The first `same` tokens have the same ids and authors."""
    lengths = [0 if part is None else len(part) for part in parts]
    same = min(lengths)
    if same:
        there = [part for part in parts if part is not None]
        ids = np.array([part.token_ids[:same] for part in there])
        # Codes of authors mean something within one run only.
        codes = [part.authors[:same].tolist() for part in there]
        names = np.array([[*map(table.name, mine)] for table, mine in zip(tables, codes, strict=True)], object)
        differs = ((ids != ids[0]) | (names != names[0])).any(axis=0)
        same = int(np.argmax(differs)) if differs.any() else same
    return {"position": position, "tokens": lengths, "same": same, "differs": same < max(lengths)}


def run_facts(store: ReplayStore, run: str) -> dict[str, QueryResult]:
    """The `numbers` of a run's summary and its `config`, each flat."""
    numbers = _flat(summary(store, run))
    del numbers["database"]
    return {"numbers": numbers, "config": _flat(dict(store.run(run).config))}


def task_success(each: Sequence[QueryResult], limit: int) -> QueryResult:
    """`questions.task_success` of several runs beside each other: `rows` by task, None where a run did not try it.

    Those of which the latest success differs most come first, of `tasks` that at least two of the runs tried.
    """
    rows = side_by_side(each)
    latest = {hash: [one["latest_success"] for one in row if one] for hash, row in rows.items()}
    shared = [hash for hash in rows if len(latest[hash]) > 1]
    shared.sort(key=lambda hash: (min(latest[hash]) - max(latest[hash]), hash))
    return {"tasks": len(shared), "rows": {hash: rows[hash] for hash in shared[:limit]}}


def side_by_side(each: Sequence[QueryResult]) -> dict[str, list[Any]]:
    """All values of each name, None where one has none."""
    return {name: [values.get(name) for values in each] for name in dict.fromkeys(name for one in each for name in one)}


def _flat(answer: QueryResult, prefix: str = "") -> QueryResult:
    flat: QueryResult = {}
    for name, value in answer.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
