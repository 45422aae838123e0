"""Who leads a run says so as long as it does, and knows when it does no more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agentloop.runs.signals import graceful_stop
from agentloop.training.collecting.leadership import Leadership
from replay.errors import ReplayError, RunReplaced
from replay.store import ReplayStore
from tests.fakes.records import RUN, new_store, sql

LEASE_S = 0.3


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ReplayStore]:
    with closing(new_store(tmp_path / "replay.sqlite")) as store:
        yield store


@pytest.fixture
def leadership(store: ReplayStore, tmp_path: Path) -> Leadership:
    return Leadership(store, RUN, tmp_path, lease_s=LEASE_S)


def test_a_learner_that_is_refused_does_not_call_workers_of_an_ended_run_back(
    store: ReplayStore, leadership: Leadership
) -> None:
    store.roles.lead(RUN, "elsewhere", lease_s=600)
    store.roles.end_run(RUN)
    with pytest.raises(ReplayError, match="while 'elsewhere' leads"), leadership.held():
        pass
    assert store.roles.view(RUN).has_ended
    store.roles.stop_leading(RUN, "elsewhere")
    with leadership.held():
        assert not store.roles.view(RUN).has_ended


def test_a_learner_with_nothing_under_way_says_why_it_ends_when_another_leads(
    store: ReplayStore, leadership: Leadership
) -> None:
    """The signal that wakes it would end it without a word of that, and with another exit code."""
    replaced = pytest.raises(RunReplaced, match="got 'elsewhere' in the place of")
    with graceful_stop(lambda text: None), replaced, leadership.held():
        sql(store, "update runs set leader = 'elsewhere'")
        time.sleep(60)
