"""Two trajectories token by token, or two buffers in numbers."""

from __future__ import annotations

import json
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from context.authors import AuthorTable
from context.tokens.token_sequence import TokenSequence
from replay.queries import QueryResult, find, summary
from replay.queries.trajectory import record_of
from replay.storage.format.rows import known
from replay.storage.format.schema import runs
from replay.storage.read import author_table, load
from replay.store import ReplayStore


def trajectories(store: ReplayStore, first: str, second: str) -> QueryResult:
    """Their records side by side, and where their tokens and messages part.

    Raises ContentGone where the tokens of one are no longer stored.
    """
    ids = [find(store, first), find(store, second)]
    with store.reading() as connection:
        pair = load(connection, ids).in_order(ids)
        tables = [author_table(connection, row.record.run) for row in pair]
    records = [record_of(row) for row in pair]
    segments = [
        _segment(position, parts, tables)
        for position, parts in enumerate(zip_longest(*([s.tokens for s in row.segments] for row in pair)))
    ]
    pairs_of_messages = zip_longest(*(row.messages for row in pair))
    return {
        "ids": ids,
        "records": {name: [records[0][name], records[1][name]] for name in records[0]},
        "different": [name for name in records[0] if records[0][name] != records[1][name]],
        "segments": segments,
        "same_tokens": all(part["first_difference"] is None for part in segments),
        "first_different_message": next((i for i, (a, b) in enumerate(pairs_of_messages) if a != b), None),
    }


def _segment(position: int, parts: tuple[TokenSequence | None, ...], tables: list[AuthorTable]) -> QueryResult:
    """`same` tokens from the beginning have the same id and author; their log-probs may still differ."""
    lengths = [0 if part is None else len(part) for part in parts]
    shorter = min(lengths)
    same = shorter
    gap = None
    if parts[0] is not None and parts[1] is not None:
        differs = parts[0].token_ids[:shorter] != parts[1].token_ids[:shorter]
        differs |= _names(parts[0], tables[0])[:shorter] != _names(parts[1], tables[1])[:shorter]
        same = int(np.argmax(differs)) if differs.any() else shorter
        gaps = np.abs(parts[0].behavior_log_probs[:same] - parts[1].behavior_log_probs[:same])
        gap = float(np.nanmax(gaps)) if np.isfinite(gaps).any() else None
    differ = same < max(lengths)
    sides = [_token(part, same, table) for part, table in zip(parts, tables, strict=True)] if differ else None
    return {
        "position": position,
        "tokens": lengths,
        "same": same,
        "first_difference": None if sides is None else {"index": same, "tokens": sides},
        "log_prob_gap": gap,
    }


def _names(part: TokenSequence, authors: AuthorTable) -> npt.NDArray[np.object_]:
    """[T]; codes mean something within one run only."""
    return np.array([authors.name(code) for code in part.authors.tolist()], object)


def _token(part: TokenSequence | None, index: int, authors: AuthorTable) -> QueryResult | None:
    """None: the sequence is over."""
    if part is None or index >= len(part):
        return None
    return {
        "token_id": int(part.token_ids[index]),
        "author": authors.name(int(part.authors[index])),
        "log_prob": known(float(part.behavior_log_probs[index])),
        "policy_version": int(part.policy_versions[index]),
    }


def buffers(stores: tuple[ReplayStore, ReplayStore], of: tuple[str | None, str | None]) -> QueryResult:
    """The numbers of two summaries, and the configuration keys in which two runs differ."""
    summaries = [_flat(summary(store, run)) for store, run in zip(stores, of, strict=True)]
    configs = [_config(store, run) for store, run in zip(stores, of, strict=True)]
    differing = {key: pair for key, pair in sorted(_paired(*configs).items()) if pair[0] != pair[1]}
    return {"numbers": _paired(*summaries), "config": differing}


def _paired(first: QueryResult, second: QueryResult) -> dict[str, list[Any]]:
    return {name: [first.get(name), second.get(name)] for name in dict.fromkeys([*first, *second])}


def _flat(answer: QueryResult, prefix: str = "") -> QueryResult:
    flat: QueryResult = {}
    for name, value in answer.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _config(store: ReplayStore, run: str | None) -> dict[str, Any]:
    """Empty where a database has several runs and none of them was asked for."""
    with store.reading() as connection:
        query = sa.select(runs.c.config)
        found = connection.scalars(query if run is None else query.where(runs.c.id == run)).all()
    return _flat(json.loads(found[0])) if len(found) == 1 else {}
