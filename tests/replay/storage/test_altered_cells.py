"""Any cell of any table becomes anything: what is trained on stays what was written, and every error is one line."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from replay.storage.format.schema import metadata
from tests.replay.storage.damaged_buffers import WAYS, Asked, alter, fill

CELLS = [(column, way) for table in metadata.sorted_tables for column in table.columns for way in range(WAYS)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("whole") / "whole.sqlite"
    fill(path)
    yield path


def check(whole: Path, folder: Path, cells: Sequence[tuple[sa.Column[Any], int]], *, some: bool) -> Counter[str]:
    """How many came out in which way. `some`: of each cell a part of what can be asked."""
    kinds: Counter[str] = Counter()
    wrong: list[str] = []
    path = folder / "altered.sqlite"
    shutil.copy(whole, path)
    with closing(Asked(path)) as asked:
        for number, (column, way) in enumerate(cells):
            for old in folder.glob("altered.sqlite*"):
                old.unlink()
            shutil.copy(whole, path)
            chance = random.Random(number)
            alter(path, column, way, chance)
            found = asked.again(chance if some else None)
            wrong += [f"{column} {way}: {where}: {error!r}" for where, error in found.raw.items()]
            wrong += [f"{column} {way}: {id} is not what was written" for id in found.different]
            kinds[found.kind] += 1
    print(dict(kinds))
    assert not wrong, "\n".join(wrong)
    return kinds


def test_altered_cell_is_refused_quarantined_or_changes_nothing_that_is_trained_on(whole: Path, tmp_path: Path) -> None:
    kinds = check(whole, tmp_path, random.Random(17).sample(CELLS, 24), some=True)
    assert kinds["quarantined"] and kinds["refused"]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_every_altered_cell_is_refused_quarantined_or_changes_nothing(whole: Path, tmp_path: Path) -> None:
    """A part of what can be asked is asked of each, another one each time."""
    check(whole, tmp_path, CELLS, some=True)
