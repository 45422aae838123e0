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
MISMATCHES = (*RUN_FIELDS, "logprobs_mode", "top_p", "top_k")
"""What `allow_mismatch` may name; the last of them are fields of `TrajectoryRecord`."""
DIFFERENCES = (*MISMATCHES, "authors", "temperature")
"""With what it may not: author codes that mean something else, and rows at temperature 0, which nothing can score."""

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
        """Bits of RUN_FIELDS and `authors`."""
        found = 0 if self.authors == other.authors else bits(("authors",))
        mine, theirs = self.fingerprint, other.fingerprint
        if mine is None or theirs is None:
            return found | (0 if self.tokenizers == other.tokenizers else bits(("tokenizer",)))
        return found | bits(tuple(name for name in RUN_FIELDS if mine.get(name) != theirs.get(name)))


def bits(names: tuple[str, ...]) -> int:
    return sum(1 << DIFFERENCES.index(name) for name in names)


def names_of(found: int) -> list[str]:
    return [name for place, name in enumerate(DIFFERENCES) if found >> place & 1]


def sampling_mismatch(rows: Any) -> sa.ColumnElement[int]:
    """Log-probs, if any, that are not those of the whole distribution at the row's temperature, which must be one."""
    known = rows.mean_behavior_log_prob.is_not(None)
    differs = {
        "logprobs_mode": known & (rows.logprobs_mode != "full"),
        "top_p": known & (rows.top_p < 1.0),
        "top_k": known & (rows.top_k > 0),
        "temperature": rows.temperature <= 0.0,
    }
    return sum((sa.case((is_so, bits((name,))), else_=0) for name, is_so in differs.items()), sa.literal(0))


def run_mismatches(connection: sa.Connection, mine: str, others: Sequence[str]) -> dict[str, int]:
    """Bits of RUN_FIELDS and `authors` of `others`, against the run `mine`; an unknown run differs in both."""
    known = meanings(connection, [mine, *others])
    unknown = bits(("authors", "tokenizer"))
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
