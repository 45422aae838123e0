"""Tells which rows of other runs can be compared with a run's own. Differences are bits, one a name in DIFFERENCES."""

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
"""Names that `allow_mismatch` accepts. The last three are fields of `TrajectoryRecord`."""
DIFFERENCES = (*MISMATCHES, "authors", "temperature")
"""All differences. The last two can't be allowed: other author codes, and temperature 0, which nothing can score."""

_RUNS = sa.select(runs.c.id, runs.c.authors, runs.c.authors_hash, runs.c.fingerprint)
_TOKENIZERS = sa.select(policies.c.run, policies.c.tokenizer_hash).distinct()


@dataclass(frozen=True)
class TokenMeaning:
    """The facts that decide whether tokens of two runs mean the same."""

    authors: str
    """Hash of the run's author table."""
    fingerprint: Mapping[str, Any] | None
    tokenizers: frozenset[str]
    """Tokenizer hashes of the run's policies, used where a run has no fingerprint."""

    def mismatch(self, other: TokenMeaning) -> int:
        """Return the bits of what differs: one bit for each of RUN_FIELDS, and one for `authors`."""
        found = 0 if self.authors == other.authors else difference_bits(("authors",))
        mine, theirs = self.fingerprint, other.fingerprint
        if mine is None or theirs is None:
            return found | (0 if self.tokenizers == other.tokenizers else difference_bits(("tokenizer",)))
        return found | difference_bits(tuple(name for name in RUN_FIELDS if mine.get(name) != theirs.get(name)))


def difference_bits(names: tuple[str, ...]) -> int:
    return sum(1 << DIFFERENCES.index(name) for name in names)


def difference_names(found: int) -> list[str]:
    return [name for place, name in enumerate(DIFFERENCES) if found >> place & 1]


def sampling_mismatch(rows: Any) -> sa.ColumnElement[int]:
    """Return an SQL expression of the difference bits of a row's sampling settings: top-p, top-k, temperature."""
    known = rows.mean_behavior_log_prob.is_not(None)
    differs = {
        "logprobs_mode": known & (rows.logprobs_mode != "full"),
        "top_p": known & (rows.top_p < 1.0),
        "top_k": known & (rows.top_k > 0),
        "temperature": rows.temperature <= 0.0,
    }
    return sum((sa.case((is_so, difference_bits((name,))), else_=0) for name, is_so in differs.items()), sa.literal(0))


def run_mismatches(connection: sa.Connection, mine: str, others: Sequence[str]) -> dict[str, int]:
    """Return the difference bits of `others` against `mine`. Unknown runs differ in authors and tokenizer."""
    known = read_token_meanings(connection, [mine, *others])
    unknown = difference_bits(("authors", "tokenizer"))
    return {run: known[run].mismatch(known[mine]) if {run, mine} <= known.keys() else unknown for run in others}


def read_token_meanings(connection: sa.Connection, named: Sequence[str]) -> dict[str, TokenMeaning]:
    """Read what tokens mean, by run id. Runs that the database does not know are left out."""
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
