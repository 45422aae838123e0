"""The search that proves a forgetting."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from replay.storage import erase
from replay.storage.erase import Traces


@pytest.mark.parametrize("length", [8, 11, 24, 96])
def test_piece_is_found_at_every_place_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    # Windows of 128 bytes: the piece stands within one, over the border of two, and at every offset to 8.
    monkeypatch.setattr("replay.storage.erase._WINDOW", 128)
    noise = np.random.default_rng(0)
    piece, absent = noise.bytes(length), noise.bytes(length)
    file = tmp_path / "file"
    for place in range(0, 300, 3):
        content = bytearray(noise.bytes(400))
        content[place : place + length] = piece
        file.write_bytes(content)
        assert set(erase._found(erase._windows(file), {piece, absent})) == {piece}, place


def test_piece_at_the_very_end_is_found(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for tail in range(8, 40):
        file.write_bytes(b"x" * tail + b"the secret is out")
        assert set(erase._found(erase._windows(file), {b"the secret is out"})) == {b"the secret is out"}


def test_long_texts_leave_three_pieces_and_short_ones_none() -> None:
    traces = Traces()
    traces.add("abcdefghijklmnopqrstuvwxyz" * 10, "short", "x" * 100, None, "héhéhéh")
    # 260 characters: from 0, from 130 - 12 and from 260 - 24; "héhéhéh" is 10 bytes.
    whole = "abcdefghijklmnopqrstuvwxyz" * 10
    assert traces.pieces == {
        whole[:24].encode(), whole[118:142].encode(), whole[236:].encode(), "héhéhéh".encode()
    }  # fmt: skip
    assert traces.complete


def test_too_much_to_search_for_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay.storage.erase._MOST_PIECES", 2)
    traces = Traces()
    traces.add("the first text that was removed, and it is long", "the second one")
    assert not traces.complete
