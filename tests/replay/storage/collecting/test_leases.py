"""Who may collect an episode, until when, and what becomes of those that nobody ends."""

from __future__ import annotations

import pytest

from replay import InvalidRecord, ReplayStore
from replay.storage.format.schema import trajectories
from replay.ticket_records import EVALUATION, LEASED
from tests.fakes.records import RUN, sql, task
from tests.replay.storage.collecting.episodes import OVER, claim, collect, episode, issue, state_of


def test_tickets_are_given_out_once_evaluations_first_then_the_oldest(store: ReplayStore) -> None:
    assert issue(store, [0, 1]) == 4
    assert issue(store, [2], size=1, purpose=EVALUATION) == 1
    places = [[each.place for each in claim(store, holder, count=2)] for holder in ("a", "b", "c", "d")]
    assert places == [[(2, 0), (0, 0)], [(0, 1), (1, 0)], [(1, 1)], []]
    assert store.tickets.last_number(RUN) == 2
    assert issue(store, [0]) == 0
    with pytest.raises(InvalidRecord, match=r"iteration must be the issued 1, got 2 in ticket 0/0\."):
        issue(store, [0], iteration=2)
    with pytest.raises(InvalidRecord, match="purpose must .* got 'play'"):
        issue(store, [3], purpose="play")


def test_zombie_that_is_first_counts_and_the_second_does_not(store: ReplayStore) -> None:
    issue(store, [0], size=1)
    (zombie,) = claim(store, "zombie", lease_s=OVER)
    (taken,) = claim(store, "second")
    assert store.tickets.finish([(zombie, episode(zombie))]) == [True]
    assert store.tickets.finish([(taken, episode(taken))]) == [False]
    assert store.tickets.fail([taken], "too slow") == {(0, 0): "done"}
    assert (store.tickets.counts(RUN).done, store.tickets.counts(RUN).open) == (1, 1)


def test_ticket_in_its_last_try_is_claimed_by_itself(store: ReplayStore) -> None:
    """It may have ended two workers: what else the third one held would fail with it."""
    issue(store, [0], size=3)
    for _ in range(2):
        assert len(claim(store, "dies", count=2, lease_s=OVER)) == 2
    given = [[(each.place, each.tries) for each in claim(store, count=8)] for _ in range(4)]
    assert given == [[((0, 2), 1)], [((0, 0), 3)], [((0, 1), 3)], []]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"member": 1}, r"member must be that of its ticket \(0\), got 1 in trajectory row-0-0"),
        ({"iteration": 4}, r"iteration must be that of its ticket \(1\), got 4"),
    ],
)
def test_row_of_another_ticket_is_refused_and_ends_nothing(
    store: ReplayStore, changes: dict[str, int], message: str
) -> None:
    issue(store, [0], size=1)
    (held,) = claim(store, "a")
    with pytest.raises(InvalidRecord, match=message):
        store.tickets.finish([(held, episode(held, **changes))])
    assert state_of(store, 0)[0] == LEASED
    assert sql(store, "select count(*) from trajectories") == [(0,)]


def test_task_of_a_ticket_is_known_after_its_last_row_went(store: ReplayStore) -> None:
    issue(store, [0], size=2)
    (id,) = collect(store, 1)
    store.forget(trajectories.c.id == id, dry_run=False)
    assert claim(store, "a")[0].task == task()
    counts = store.tickets.counts(RUN)
    assert (counts.done, counts.unused, counts.rows) == (1, 1, 1)
