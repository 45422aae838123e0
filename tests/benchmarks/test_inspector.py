from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from benchmarks import inspected_run, inspector
from benchmarks._buffer import fill
from benchmarks._rows import RUN
from replay import ReplayStore
from replay.questions import Query, page, summary


def test_buffer_of_the_benchmark_is_one_that_a_run_could_leave(tmp_path: Path) -> None:
    with closing(ReplayStore.create(tmp_path / "replay.sqlite")) as store:
        fill(store, 3 * 64, np.random.default_rng(0))
        assert not (found := store.verify()).corrupt and not found.damage
        assert summary(store)["trajectories"] == 2 * 64
        assert {row["uses"] for row in page(store, Query(RUN), limit=128)["rows"]} >= {1}


def test_benchmark_asks_every_page_of_the_inspector() -> None:
    found = inspector.main(rounds=1, size=500)
    assert found["list_median_ms"] > 0
    assert found.keys() >= inspector.GOALS.keys()


@pytest.mark.slow
def test_run_that_is_inspected_meets_with_no_error() -> None:
    assert inspected_run.main() == {}
    assert inspected_run.main(["--minutes", "0.5"]).keys() >= inspected_run.GOALS.keys()
