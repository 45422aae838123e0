"""Any cell of any table becomes anything: what is trained on stays what was written, and no exception is raw."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from replay import ReplayStore, queries
from replay.errors import DamagedCell
from replay.storage.databases import Location
from replay.storage.format.schema import metadata
from tests.fakes.databases import Databases
from tests.fakes.records import RUN
from tests.replay.storage.altered_cells import Alteration, Asked, alter, alterations, fill


class Copies:
    """One place, where a whole buffer is put again and again."""

    def __init__(self, databases: Databases, folder: Path) -> None:
        self._databases = databases
        self._whole = databases.new(folder / "whole.sqlite")
        fill(self._whole)
        self.location: Location = folder / "altered.sqlite"
        self._name = ""
        if not isinstance(self._whole, Path):
            self._name = self._whole.rpartition("/")[2].partition("?")[0] + "_altered"
            self.location = databases.server.url(self._name)
        self.renew()

    def renew(self) -> None:
        if isinstance(self.location, Path) and isinstance(self._whole, Path):
            for old in self.location.parent.glob(f"{self.location.name}*"):
                old.unlink()
            shutil.copy(self._whole, self.location)
        else:
            self._databases.server.drop(self._name)
            whole = self._name.removesuffix("_altered")
            self._databases.server.ask(f"create database {self._name} template {whole}")

    def drop(self) -> None:
        if self._name:
            self._databases.server.drop(self._name)
        self._databases.drop_all()


def check(
    databases: Databases, folder: Path, changes: Sequence[Alteration], sampled: random.Random | None = None
) -> Counter[str]:
    """How many came out in which way."""
    kinds: Counter[str] = Counter()
    wrong: list[str] = []
    copies = Copies(databases, folder)
    try:
        with closing(Asked(copies.location, folder)) as asked:
            for change in changes:
                copies.renew()
                if not alter(copies.location, change):
                    kinds["can't be so"] += 1
                    continue
                found = asked.again(sampled)
                wrong += [f"{change}: {where}: {error!r}" for where, error in found.raw.items()]
                wrong += [f"{change}: {id} is not what was written" for id in found.different]
                kinds[found.kind] += 1
    finally:
        copies.drop()
    print(dict(kinds))
    assert not wrong, "\n".join(wrong)
    return kinds


def test_altered_cell_is_refused_quarantined_or_changes_nothing_that_is_trained_on(
    databases: Databases, tmp_path: Path
) -> None:
    """Forty of them: twenty on each of two databases."""
    chance = random.Random(16)
    cells = chance.sample(alterations(sqlite=databases.is_sqlite), 20)
    kinds = check(databases, tmp_path, cells, chance)
    assert kinds["quarantined"] and kinds["refused"]


def test_null_that_a_column_can_not_hold_is_refused_where_it_comes_by_way_of_another_table(
    databases: Databases, tmp_path: Path
) -> None:
    location = databases.new(tmp_path / "replay.sqlite")
    fill(location)
    assert alter(location, Alteration("reclaimed", "reward", "null"))
    message = r"^trajectories.reward must hold a finite number, got None"
    with closing(ReplayStore.open(location, read_only=True)) as store, pytest.raises(DamagedCell, match=message):
        queries.iteration(store, RUN, 1)


@pytest.mark.soak
@pytest.mark.parametrize("table", [table.name for table in metadata.sorted_tables])
def test_every_altered_cell_is_refused_quarantined_or_changes_nothing_that_is_trained_on(
    databases: Databases, tmp_path: Path, table: str
) -> None:
    """Everything is asked of each, which takes seconds: a table at a time."""
    check(databases, tmp_path, [each for each in alterations(sqlite=databases.is_sqlite) if each.table == table])
