"""Whether the tokens of one run mean to another what they mean to itself, before they are in one database."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from replay.exchange.row_format import Bundle
from replay.exchange.stored_rows import known_policies, known_runs
from replay.records import PolicyRecord, RunRecord, TrajectoryRecord
from replay.sampling.compatibility import RUN_FIELDS
from replay.store import ReplayStore


@dataclass(frozen=True)
class Meaning:
    """What a run's tokens are made with."""

    authors: str
    fingerprint: Mapping[str, Any] | None
    tokenizers: frozenset[str]
    """Of its policies, for runs that tell no fingerprint."""

    @classmethod
    def of(cls, run: RunRecord, policies: Iterable[PolicyRecord]) -> Meaning:
        return cls(run.authors_hash, run.fingerprint, frozenset(policy.tokenizer_hash for policy in policies))

    @classmethod
    def stored(cls, connection: sa.Connection, run: str) -> Meaning:
        return cls.of(known_runs(connection)[run], known_policies(connection, run).values())

    def differs(self, other: Meaning, allowed: Sequence[str]) -> list[str]:
        """What keeps one from learning from the other, as `replay.sampling.compatibility` has it in a database."""
        authors = [] if self.authors == other.authors else ["authors"]
        if self.fingerprint is None or other.fingerprint is None:
            names = [] if self.tokenizers == other.tokenizers else ["tokenizer"]
        else:
            names = [name for name in RUN_FIELDS if self.fingerprint.get(name) != other.fingerprint.get(name)]
        return authors + [name for name in names if name not in allowed]


@dataclass(frozen=True)
class Learner:
    """The run that rows are imported for."""

    run: str
    meaning: Meaning
    allowed: Sequence[str]
    """Its `replay.allow_mismatch`."""

    def differs(self, bundle: Bundle) -> list[str]:
        """What keeps the run from learning from a row."""
        if bundle.run.id == self.run:
            return []
        return [
            *Meaning.of(bundle.run, bundle.policies).differs(self.meaning, self.allowed),
            *(name for name in _unlike_own(bundle.trajectory.record) if name not in self.allowed),
        ]


def learner_of(store: ReplayStore, run: str) -> Learner | None:
    """The run of that id; None: the database does not know it."""
    with store.reading() as connection:
        record = known_runs(connection).get(run)
        if record is None:
            return None
        settings = record.config.get("replay")
        allowed = settings.get("allow_mismatch") if isinstance(settings, dict) else None
        allowed = allowed if isinstance(allowed, list) else []
        return Learner(record.id, Meaning.stored(connection, record.id), allowed)


def _unlike_own(record: TrajectoryRecord) -> list[str]:
    """Which settings made a row's log-probs others than those of the whole distribution, if it has any."""
    if math.isnan(record.mean_behavior_log_prob):
        return []
    found = {"logprobs_mode": record.logprobs_mode != "full", "top_p": record.top_p < 1, "top_k": record.top_k > 0}
    return [name for name, differs in found.items() if differs]
