"""Which stored rows mean the same as the drawing run's own: the same tokens, and log-probs of the same kind."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from replay.storage.format.rows import check_authors
from replay.storage.format.schema import policies, runs

RUN_FIELDS = ("tokenizer", "template", "model_family", "vocab_size")
"""Of `RunRecord.fingerprint`."""
ROW_FIELDS = ("logprobs_mode", "top_p", "top_k")
"""Of `TrajectoryRecord`."""
MISMATCHES = (*RUN_FIELDS, *ROW_FIELDS)
"""What `allow_mismatch` may name."""
AUTHORS = 1 << len(MISMATCHES)
"""The author codes of the run's tokens mean something else: never allowed."""


_Facts = Mapping[str, tuple[str, dict[str, Any] | None]]
"""Hash of the authors and fingerprint, by run."""
_RUNS = sa.select(runs.c.id, runs.c.authors, runs.c.authors_hash, runs.c.fingerprint)
_TOKENIZERS = sa.select(policies.c.run, policies.c.tokenizer_hash).distinct()


def bits(names: tuple[str, ...]) -> int:
    return sum(1 << MISMATCHES.index(name) for name in names)


def names_of(found: int) -> list[str]:
    names = [name for place, name in enumerate(MISMATCHES) if found >> place & 1]
    return [*names, "authors"] if found & AUTHORS else names


def sampling_mismatch(rows: Any) -> sa.ColumnElement[int]:
    """Bits of ROW_FIELDS: log-probs that are not those of the whole distribution at the row's temperature.

    A row without log-probs has none to compare.
    """
    known = rows.mean_behavior_log_prob.is_not(None)
    conditions = (rows.logprobs_mode != "full", rows.top_p < 1.0, rows.top_k > 0)
    total: sa.ColumnElement[int] = sa.literal(0)
    for name, condition in zip(ROW_FIELDS, conditions, strict=True):
        total = total + sa.case((known & condition, bits((name,))), else_=0)
    return total


def run_mismatches(connection: sa.Connection, mine: str, others: Sequence[str]) -> dict[str, int]:
    """Bits of RUN_FIELDS and AUTHORS of `others`, against the run `mine`.

    A run from before there were fingerprints is compared by its author table and its policies' tokenizers. Of one
    that the database does not know, neither is known.
    """
    named = [mine, *others]
    stored = connection.execute(_RUNS.where(runs.c.id.in_(named))).all()
    for row in stored:
        check_authors(row.id, row.authors, row.authors_hash)
    facts = {id: (authors, json.loads(text) if text else None) for id, _, authors, text in stored}
    tokenizers = _tokenizers(connection, named) if any(print is None for _, print in facts.values()) else {}
    return {run: _mismatch(run, mine, facts, tokenizers) for run in others}


def _mismatch(run: str, mine: str, facts: _Facts, tokenizers: Mapping[str, set[str]]) -> int:
    if run not in facts or mine not in facts:
        return AUTHORS | bits(("tokenizer",))
    (authors, print), (own_authors, own_print) = facts[run], facts[mine]
    mismatch = 0 if authors == own_authors else AUTHORS
    if print is None or own_print is None:
        return mismatch | (0 if tokenizers.get(run) == tokenizers.get(mine) else bits(("tokenizer",)))
    return mismatch | bits(tuple(name for name in RUN_FIELDS if print.get(name) != own_print.get(name)))


def _tokenizers(connection: sa.Connection, named: Sequence[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for run, tokenizer in connection.execute(_TOKENIZERS.where(policies.c.run.in_(named))):
        found.setdefault(run, set()).add(tokenizer)
    return found
