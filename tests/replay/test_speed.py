from __future__ import annotations

from pathlib import Path

from benchmarks.store import measure


def test_store_is_within_an_order_of_magnitude_of_raw_blobs(tmp_path: Path) -> None:
    """`make bench` reports the figures. This limit is for a design that went wrong, on any machine however busy."""
    times = measure(5, tmp_path)
    for name, limit in (("append", 12.0), ("draw", 40.0)):
        assert min(mine / theirs for mine, theirs in zip(times[name]["store"], times[name]["raw"], strict=True)) < limit
    # Ids, authors and versions compress; float log-probs hardly do, and texts stay readable.
    assert (tmp_path / "store.sqlite").stat().st_size < 0.8 * (tmp_path / "raw.sqlite").stat().st_size
