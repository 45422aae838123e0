from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import inspector
from benchmarks._buffer import LONG, add_long, fill
from benchmarks._rows import RUN
from replay import ReplayStore
from replay.questions import Query, page, summary


@pytest.mark.soak
def test_buffer_of_the_benchmark_is_one_that_a_run_could_leave(tmp_path: Path) -> None:
    store = ReplayStore.create(tmp_path / "replay.sqlite")
    fill(store, 2 * 64, np.random.default_rng(0))
    add_long(store, turns=5, turn_tokens=20)
    assert not (found := store.verify()).corrupt and not found.dangling and not found.damage
    # At least as many as asked: iterations of 64 come sixteen at a time, and 128 / 5 of the other run are none.
    assert summary(store)["trajectories"] == 16 * 64 + 1
    long = page(store, Query(RUN, (f"id == '{LONG}'",)))["rows"][0]
    assert (long["num_turns"], long["num_tokens"]) == (5, 5 * 20)
    assert {row["uses"] for row in page(store, Query(RUN), limit=64)["rows"]} >= {1}
    assert set(inspector.pages(store)) >= {"buffer", "long_trajectory", "mixing"}
    store.close()


@pytest.mark.soak
def test_benchmark_asks_every_page_of_the_inspector() -> None:
    found = inspector.main(rounds=1, size=2_000)
    assert found["list_median_ms"] > 0
    assert set(inspector.GOALS) - set(found) <= {"first_render_ms", "long_trajectory_render_ms"}
