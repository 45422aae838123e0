"""One learner leads a run: a second one is refused, and one that was replaced is asked to stop and says so."""

from __future__ import annotations

import signal
import threading
from contextlib import closing
from pathlib import Path

import pytest

from agentloop.training.collecting.leadership import Leadership
from replay import ReplayError, ReplayStore, RunReplaced
from tests.fakes.records import RUN, new_store, sql

LIMIT_S = 60.0


def test_a_second_learner_is_refused_until_the_first_one_has_left(tmp_path: Path) -> None:
    database = tmp_path / "replay.sqlite"
    with closing(new_store(database)) as store, closing(ReplayStore.open(database)) as other:
        second = Leadership(other, RUN, tmp_path / "b", lease_s=600.0)
        with (
            Leadership(store, RUN, tmp_path / "a", lease_s=600.0).held(),
            pytest.raises(ReplayError, match=r"run must have one learner, got '.*/b' while '.*/a' leads run-1"),
            second.held(),
        ):
            pass
        with second.held():
            pass


def test_a_learner_that_was_replaced_is_asked_to_stop_within_its_lease(tmp_path: Path) -> None:
    asked = threading.Event()
    previous = signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
    try:
        with (
            closing(new_store(tmp_path / "replay.sqlite")) as store,
            pytest.raises(RunReplaced, match="run must have one learner, got 'another' in the place of"),
            Leadership(store, RUN, tmp_path, lease_s=0.3).held(),
        ):
            sql(store, "update runs set leader = 'another'")
            assert asked.wait(LIMIT_S)
    finally:
        signal.signal(signal.SIGTERM, previous)
