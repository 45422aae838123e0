"""A second buffer as a source of draws: its rows are copied into the own one, which is then all that a draw reads.

A copy, because a draw is on record with its trajectory, and both have to be in one database to stay true.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from replay.comparable import RUN_FIELDS
from replay.databases.open import DATABASE, Location, run_identity
from replay.exchange.files import ExchangeError
from replay.exchange.loading import ImportReport, Placed, Told, import_rows
from replay.exchange.source import Left, bundles, exportable, known_policies, known_runs
from replay.records import ELIGIBLE
from replay.schema import trajectories
from replay.store import ReplayStore


def location_of(place: str) -> Location:
    """The database of a run folder, or the file or URL itself."""
    if "://" in place or not Path(place).is_dir():
        return place
    named = run_identity(Path(place)).database
    return Path(place) / DATABASE if named is None else named


def check_attachable(place: str) -> None:
    """Raises ReplayError where no buffer can be opened."""
    with closing(ReplayStore.open(location_of(place), read_only=True)):
        pass


def attach(
    store: ReplayStore,
    run: str,
    name: str,
    place: str,
    *,
    allow_mismatch: Sequence[str] = (),
    told: Told = lambda phase, done: None,
) -> ImportReport:
    """Copy the rows that `run` may draw, with `name` as their source; those copied before stay as they are.

    These are the eligible ones of runs with the same authors, tokenizer, template and model family, but for what
    `allow_mismatch` names. The other buffer is only read, and what it gets later is not seen.
    """
    with closing(ReplayStore.open(location_of(place), read_only=True)) as other:
        if other.url == store.url:
            raise ExchangeError(f"replay.attach.{name} must be another buffer, got the run's own. Leave it out.")
        with store.reading() as connection:
            mine = _meaning(connection, run)
        with other.reading() as connection:
            others = [id for id in known_runs(connection) if id != run]
            comparable = [id for id in others if _same(_meaning(connection, id), mine, allow_mismatch)]
        # The run's own rows may be there too, in a database that both once shared.
        where = (trajectories.c.state == ELIGIBLE) & trajectories.c.run.in_(comparable)
        left = Left()
        ids = exportable(other, left, run=None, where=where)

        def rows() -> Iterator[Placed]:
            return ((f"{name}:{bundle.trajectory.id}", bundle) for bundle in bundles(other, ids, left))

        report = import_rows(store, rows, source=name, told=told)
    if not ids:
        raise ExchangeError(
            f"replay.attach.{name} must hold rows that this run can learn from, got none in {other.url} of its "
            "tokenizer and authors. Leave it out, or attach another."
        )
    report.problems += [f"{name}:{id}: {reason}" for id, reason in left.corrupt.items()]
    report.bad = len(left.corrupt)
    return report


@dataclass(frozen=True)
class _Meaning:
    """Of a run's tokens."""

    authors: str
    fingerprint: Mapping[str, Any] | None
    tokenizers: frozenset[str]
    """Of its policies, for runs from before there were fingerprints."""


def _meaning(connection: sa.Connection, run: str) -> _Meaning:
    record = known_runs(connection)[run]
    published = known_policies(connection, run).values()
    return _Meaning(record.authors_hash, record.fingerprint, frozenset(row.tokenizer_hash for row in published))


def _same(one: _Meaning, other: _Meaning, allowed: Sequence[str]) -> bool:
    """As `replay.comparable` has it within one database."""
    if one.authors != other.authors:
        return False
    if one.fingerprint is None or other.fingerprint is None:
        return "tokenizer" in allowed or one.tokenizers == other.tokenizers
    return all(name in allowed or one.fingerprint.get(name) == other.fingerprint.get(name) for name in RUN_FIELDS)
