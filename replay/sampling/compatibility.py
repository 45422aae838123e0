"""Which stored rows mean the same as the drawing run's own: the same tokens, and log-probs of the same kind."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from replay.storage.format.rows import check_authors
from replay.storage.format.schema import policies, runs

RUN_FIELDS = ("tokenizer", "template", "model_family", "vocab_size")
"""Keys of `RunRecord.fingerprint`."""
ROW_FIELDS = ("logprobs_mode", "top_p", "top_k")
"""Fields of `TrajectoryRecord`."""
MISMATCHES = (*RUN_FIELDS, *ROW_FIELDS)
"""What `allow_mismatch` may name."""
AUTHORS = 1 << len(MISMATCHES)
"""The author codes of the run's tokens mean something else: never allowed."""

_RUNS = sa.select(runs.c.id, runs.c.authors, runs.c.authors_hash, runs.c.fingerprint)
_TOKENIZERS = sa.select(policies.c.run, policies.c.tokenizer_hash).distinct()


@dataclass(frozen=True)
class TokenMeaning:
    """What a run's tokens are made with."""

    authors: str
    """Hash of the author table."""
    fingerprint: Mapping[str, Any] | None
    tokenizers: frozenset[str]
    """Hashes from its policies, for runs without a fingerprint."""

    def mismatch(self, other: TokenMeaning) -> int:
        """Bits of RUN_FIELDS and AUTHORS."""
        found = 0 if self.authors == other.authors else AUTHORS
        mine, theirs = self.fingerprint, other.fingerprint
        if mine is None or theirs is None:
            return found | (0 if self.tokenizers == other.tokenizers else bits(("tokenizer",)))
        return found | bits(tuple(name for name in RUN_FIELDS if mine.get(name) != theirs.get(name)))


def bits(names: tuple[str, ...]) -> int:
    return sum(1 << MISMATCHES.index(name) for name in names)


def names_of(found: int) -> list[str]:
    names = [name for place, name in enumerate(MISMATCHES) if found >> place & 1]
    return [*names, "authors"] if found & AUTHORS else names


def sampling_mismatch(rows: Any) -> sa.ColumnElement[int]:
    """Bits of ROW_FIELDS: log-probs, if any, that are not those of the whole distribution at the row's temperature."""
    known = rows.mean_behavior_log_prob.is_not(None)
    total: sa.ColumnElement[int] = sa.literal(0)
    for name, differs in zip(ROW_FIELDS, (rows.logprobs_mode != "full", rows.top_p < 1.0, rows.top_k > 0), strict=True):
        total = total + sa.case((known & differs, bits((name,))), else_=0)
    return total


def run_mismatches(connection: sa.Connection, mine: str, others: Sequence[str]) -> dict[str, int]:
    """Bits of RUN_FIELDS and AUTHORS of `others`, against the run `mine`; an unknown run differs in both."""
    known = meanings(connection, [mine, *others])
    unknown = AUTHORS | bits(("tokenizer",))
    return {run: known[run].mismatch(known[mine]) if {run, mine} <= known.keys() else unknown for run in others}


def meanings(connection: sa.Connection, named: Sequence[str]) -> dict[str, TokenMeaning]:
    """What their tokens mean, by id, of the runs that the database knows."""
    stored = connection.execute(_RUNS.where(runs.c.id.in_(named))).all()
    tokenizers: dict[str, set[str]] = {row.id: set() for row in stored}
    if not all(row.fingerprint for row in stored):
        for run, tokenizer in connection.execute(_TOKENIZERS.where(policies.c.run.in_(list(tokenizers)))):
            tokenizers[run].add(tokenizer)
    found = {}
    for id, authors, authors_hash, fingerprint in stored:
        check_authors(id, authors, authors_hash)
        made = json.loads(fingerprint) if fingerprint else None
        found[id] = TokenMeaning(authors_hash, made, frozenset(tokenizers[id]))
    return found
