"""One bit of a file, of its header or of its log flips: nothing else is trained on, and no exception is raw."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from tests.replay.storage.damaged_buffers import Asked, buffer_with_log, place

pytestmark = pytest.mark.soak

FLIPS = 2_000
_HEADER = 100
"""Bytes of a SQLite file's header; of a log's 32, of each of its frames' 24."""


def flipped(content: bytes, at: int, chance: random.Random) -> bytes:
    changed = bytearray(content)
    changed[at] ^= 1 << chance.randrange(8)
    return bytes(changed)


def test_flipped_bit_changes_nothing_that_is_trained_on_and_is_never_a_raw_exception(tmp_path: Path) -> None:
    whole, log = buffer_with_log(tmp_path)
    path = tmp_path / "flipped.sqlite"
    place(path, whole, log)
    kinds: Counter[str] = Counter()
    wrong: list[str] = []
    with closing(Asked(path)) as asked:
        for seed in range(FLIPS):
            chance = random.Random(seed)
            where = chance.choice(["file", "file", "file", "header", "log"])
            file, wal = whole, log
            if where == "log":
                wal = flipped(log, chance.randrange(len(log)), chance)
            else:
                file = flipped(whole, chance.randrange(_HEADER if where == "header" else len(whole)), chance)
            place(path, file, wal)
            kind, found = asked.again(chance)
            kinds[f"{where}: {kind}"] += 1
            wrong += [f"seed {seed}, {where}: {what}" for what in found]
    print(dict(kinds))
    assert not wrong, "\n".join(wrong)
