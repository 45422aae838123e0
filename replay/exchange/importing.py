"""Import of rows: all rows are checked before the first is stored, and a row stored before is not stored again."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from replay.errors import InvalidRecord, shortened
from replay.exchange.files import ExchangeError, batched
from replay.exchange.json_text import BadRow
from replay.exchange.row_format import Bundle
from replay.exchange.stored_rows import known_policies, known_runs, stored_sources
from replay.records import OWN_SOURCES, SOURCE_NAME, PolicyRecord, RunRecord
from replay.storage.validate import NOTHING_STORED, checked
from replay.store import ReplayStore

_MOST_NAMED = 20

Placed = tuple[str, Bundle | BadRow]
"""The place `FILE:LINE` of a row, and the row or the problem with it."""
Progress = Callable[[Literal["check", "store"], int], None]
"""Is called with the phase and the number of rows done."""


@dataclass
class ImportReport:
    rows: int = 0
    """Good rows of the file."""
    inserted: int = 0
    duplicates: int = 0
    """Rows that were stored before with the same content, or that the file repeats."""
    bad: int = 0
    """Rows left out because something is wrong with them."""
    problems: list[str] = field(default_factory=list)
    """The first bad rows, each as `FILE:LINE: problem`."""
    empty_sources: list[str] = field(default_factory=list)
    """A sentence for each source that gives the run no row, even after the import."""

    def add_bad(self, place: str, problem: str) -> None:
        self.bad += 1
        if len(self.problems) < _MOST_NAMED:
            self.problems.append(f"{place}: {problem}")


def check_set_name(name: str) -> None:
    """Raises ExchangeError for a name that can't be a source of imported rows."""
    if not SOURCE_NAME.fullmatch(name) or name in OWN_SOURCES:
        raise ExchangeError(
            f"--name must match {SOURCE_NAME.pattern} and be none of {', '.join(OWN_SOURCES)}, got {name!r}. "
            "Choose another."
        )


def import_rows(
    store: ReplayStore,
    rows: Callable[[], Iterable[Placed]],
    report: ImportReport,
    *,
    source: str | None,
    skip_bad: bool = False,
    progress: Progress = lambda phase, done: None,
) -> None:
    """Store rows batch by batch, each batch whole or not at all. Each call of `rows` reads them from the start.

    `source` is written into every new row; None: every row keeps its own. `report` gets the counts. Raises
    ExchangeError before anything is stored if a row is bad; `skip_bad` leaves bad rows out instead.
    """
    check, bad, done = _Check(store, source), set[str](), 0
    for batch in _batches(rows()):
        for place, problem in check.problems(batch):
            bad.add(place)
            report.add_bad(place, problem)
        done += len(batch)
        progress("check", done)
    if report.bad and not skip_bad:
        more = f" {report.bad - 1} more rows are bad." if report.bad > 1 else ""
        raise ExchangeError(f"{report.problems[0]}{more} Nothing was stored. Correct the file, or skip bad rows.")
    for batch in _batches(rows()):
        good = [row for place, row in batch if place not in bad and isinstance(row, Bundle)]
        _store(store, check.with_sources(good), report)
        progress("store", report.rows)


def _batches(rows: Iterable[Placed]) -> Iterator[list[Placed]]:
    return batched(rows, lambda placed: placed[1].size if isinstance(placed[1], Bundle) else 0)


class _Check:
    """Checks rows: each by itself, against each other, and against stored rows."""

    def __init__(self, store: ReplayStore, source: str | None) -> None:
        self._store = store
        self._source = source
        self._digests: dict[tuple[str, str], bytes] = {}
        with store.reading() as connection:
            self._runs = known_runs(connection)
        self._policies: dict[str, dict[int, PolicyRecord]] = {}

    def with_sources(self, bundles: Sequence[Bundle]) -> list[Bundle]:
        """The rows with their final sources. A row that is stored already keeps the source it has there."""
        with self._store.reading() as connection:
            stored = stored_sources(connection, [bundle.trajectory.id for bundle in bundles])
        sources = [stored.get(row.trajectory.id, self._source or row.trajectory.record.source) for row in bundles]
        return [row.with_record(source=source) for row, source in zip(bundles, sources, strict=True)]

    def problems(self, batch: Sequence[Placed]) -> Iterator[tuple[str, str]]:
        """The place and the problem of each bad row."""
        yield from ((place, str(row)) for place, row in batch if isinstance(row, BadRow))
        read = [(place, row) for place, row in batch if isinstance(row, Bundle)]
        alone = []
        for (place, _), bundle in zip(read, self.with_sources([row for _, row in read]), strict=True):
            try:
                self._check_references(bundle)
                alone.append((place, bundle))
            except (BadRow, InvalidRecord) as error:
                yield place, _problem(error)
        if self._refused([bundle for _, bundle in alone]):  # only then is each row checked alone
            yield from ((place, problem) for place, bundle in alone if (problem := self._refused([bundle])))

    def _refused(self, bundles: Sequence[Bundle]) -> str | None:
        try:
            self._store.check(*_records(bundles), {bundle.run.id: bundle.run for bundle in bundles})
        except InvalidRecord as error:
            return _problem(error)
        return None

    def _check_references(self, bundle: Bundle) -> None:
        self._check_run(bundle.run)
        for policy in bundle.policies:
            self._check_policy(policy)
        record = bundle.trajectory.record
        parts = {"task": (record.task, bundle.task), "group": (record.group, bundle.group)}
        for kind, (key, value) in {**parts, "trajectory": (record.id, record)}.items():
            digest = hashlib.blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=16).digest()
            if self._digests.setdefault((kind, key), digest) != digest:
                raise BadRow(f"{kind} must be the same in every row, got {shortened(key)} with two contents.")

    def _check_run(self, run: RunRecord) -> None:
        known = self._runs.get(run.id)
        if known is None:
            checked([run], "run", "id")
            self._runs[run.id] = known = run
        for name, value in vars(run).items():
            if (mine := getattr(known, name)) != value:
                raise BadRow(
                    f"run_{name} must be that of the known run {shortened(run.id)} ({shortened(mine)}), "
                    f"got {shortened(value)}."
                )

    def _check_policy(self, policy: PolicyRecord) -> None:
        if policy.run not in self._policies:
            with self._store.reading() as connection:
                self._policies[policy.run] = known_policies(connection, policy.run)
        known = self._policies[policy.run].get(policy.version)
        if known is None:
            checked([policy], "policy", "version")
            self._policies[policy.run][policy.version] = policy
        elif (known.tokenizer_hash, known.template_hash) != (policy.tokenizer_hash, policy.template_hash):
            raise BadRow(f"policies must be those of the known run {shortened(policy.run)}, got another tokenizer.")


def _problem(error: Exception) -> str:
    return str(error).removesuffix(NOTHING_STORED)


def _records(bundles: Sequence[Bundle]) -> tuple[list, list, list]:  # type: ignore[type-arg]  # what append takes
    return [row.task for row in bundles], [row.group for row in bundles], [row.trajectory for row in bundles]


def _store(store: ReplayStore, bundles: Sequence[Bundle], report: ImportReport) -> None:
    for run in {bundle.run.id: bundle.run for bundle in bundles}.values():
        store.add_run(run)
        with store.reading() as connection:
            known = known_policies(connection, run.id)
        wanted = {policy.version: policy for row in bundles if row.run.id == run.id for policy in row.policies}
        for version in wanted.keys() - known.keys():
            store.add_policy(wanted[version])
    try:
        times = {row.trajectory.id: row.created_at for row in bundles if row.created_at is not None}
        appended = store.append(*_records(bundles), created_at=times)
    except InvalidRecord as error:
        raise ExchangeError(
            f"{_problem(error)} {report.inserted} rows of the file had been stored before. Import the file again to "
            "store the rest."
        ) from error
    store.labels.add_missing({bundle.trajectory.id: bundle.labels for bundle in bundles})
    store.labels.add_missing({bundle.run.id: bundle.run_labels for bundle in bundles}, on="run")
    report.rows += len(bundles)
    report.inserted += appended.inserted
    report.duplicates += appended.duplicates
