from dataclasses import replace

import pytest

from replay import InvalidRecord, ReplayError, ReplayStore
from replay.errors import RunReplaced
from replay.storage.collecting.ticket_records import EVALUATION, LEASED
from replay.storage.format.schema import trajectories
from tests.fakes.records import RUN, sql, task, ticket_counts
from tests.replay.storage.collecting.episodes import OVER, claim, collect, episode, issue, state_of

pytestmark = pytest.mark.every_database


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


def test_ticket_counts_for_whoever_is_first(store: ReplayStore) -> None:
    """The second to claim it, and the one whose lease was over."""
    issue(store, [0, 1], size=1)
    (zombie, slow), (taken, second) = claim(store, "zombie", count=2, lease_s=OVER), claim(store, "second", count=2)
    assert (zombie.fence, taken.fence, claim(store, "third")) == (1, 2, [])
    assert store.tickets.extend([zombie], lease_s=60) == {(0, 0): LEASED}
    assert store.tickets.finish([(taken, episode(taken))]) == [True]
    assert store.tickets.finish([(taken, episode(taken))]) == [True]
    assert store.tickets.finish([(zombie, episode(zombie, suffix="-again"))]) == [False]
    assert store.tickets.finish([(slow, episode(slow))]) == [True]
    assert store.tickets.finish([(second, episode(second))]) == [False]
    assert store.tickets.fail([second], "too slow") == {(1, 0): "done"}
    assert sql(store, "select id from trajectories order by 1") == [("row-0-0",), ("row-1-0",)]
    assert (ticket_counts(store).done, ticket_counts(store).open) == (2, 2)


def test_ticket_that_kills_its_workers_fails_and_one_given_back_is_free(store: ReplayStore) -> None:
    issue(store, [0, 1], size=1)
    for tries in (1, 2, 3):
        (given,) = claim(store, f"worker-{tries}", lease_s=OVER)
        assert (given.place, given.tries) == ((0, 0), tries)
    (other,) = claim(store, "fourth")
    assert (other.place, state_of(store, 0)[0]) == ((1, 0), "failed")
    assert store.tickets.give_back([other]) == {}
    assert state_of(store, 1)[:4] == ("queued", None, 1, 0)


def test_evaluation_ends_with_an_outcome_and_a_revoked_one_is_named(store: ReplayStore) -> None:
    issue(store, [0], size=2, purpose=EVALUATION)
    first, second = claim(store, count=2)
    assert store.tickets.finish_evaluation(first, {"success": True})
    assert store.tickets.revoke(RUN, EVALUATION, "the run ends") == 1
    assert store.tickets.extend([second], lease_s=60) == {(0, 1): "revoked"}
    (ended,) = store.tickets.ended_groups(RUN, EVALUATION)
    assert [member.outcome for member in ended.members] == [{"success": True}, None]


def test_ticket_in_its_last_try_is_claimed_by_itself(store: ReplayStore) -> None:
    """Two workers may have died of it: what else the third one held would fail with it."""
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
def test_row_of_another_ticket_ends_nothing(store: ReplayStore, changes: dict[str, int], message: str) -> None:
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
    counts = ticket_counts(store)
    assert (counts.done, counts.unused, counts.rows) == (1, 1, 1)


def test_participants_are_known_until_they_leave_and_a_worker_sees_its_run_at_one_look(store: ReplayStore) -> None:
    view = store.roles.view(RUN, lease_s=600.0)
    assert (view.has_ended, view.has_free_tickets, view.engines) == (False, False, ())
    issue(store, [0], size=1)
    for id, in_flight in (("w-1", 0), ("w-2", 0), ("w-1", 7)):
        store.roles.report("worker", RUN, id, {"in_flight": in_flight})
    store.roles.report("engine", RUN, "http://e:8000", {"state": "serving"})
    listed = store.roles.listed("worker", RUN)
    assert [(each.id, each.facts) for each in listed] == [("w-1", {"in_flight": 7}), ("w-2", {"in_flight": 0})]
    assert all(0 <= each.silent_s <= each.age_s < 600 for each in listed)
    store.roles.leave("worker", RUN, "w-1")
    assert [each.id for each in store.roles.listed("worker", RUN)] == ["w-2"]
    store.roles.end_run(RUN)
    view = store.roles.view(RUN, lease_s=600.0)
    assert (view.has_ended, view.has_free_tickets) == (True, True)
    assert [(engine.id, engine.facts) for engine in view.engines] == [("http://e:8000", {"state": "serving"})]
    (held,) = claim(store)
    assert not store.roles.view(RUN, lease_s=600.0).has_free_tickets
    store.tickets.extend([held], lease_s=OVER)
    assert store.roles.view(RUN, lease_s=600.0).has_free_tickets


def test_leases_from_before_the_clock_was_put_back_are_over(store: ReplayStore) -> None:
    hour, lease = 3600.0, 60.0
    issue(store, [0, 1], size=1)
    (dead, alive) = claim(store, "before", count=2, lease_s=lease)
    store.roles.report("worker", RUN, "before", {})
    store.roles.lead(RUN, "before", lease_s=lease)
    # As if all of it had been an hour ahead of now.
    store.tickets.extend([dead], lease_s=hour + lease)
    store.roles.still_leads(RUN, "before", lease_s=hour + lease)
    (before,) = store.roles.listed("worker", RUN)
    assert not before.is_gone(lease)
    assert replace(before, silent_s=-hour).is_gone(lease)
    assert store.roles.view(RUN, lease_s=lease).has_free_tickets
    assert [each.place for each in claim(store, "after", count=2, lease_s=lease)] == [dead.place]
    assert not store.roles.view(RUN, lease_s=lease).has_free_tickets
    store.roles.lead(RUN, "after", lease_s=lease)
    with pytest.raises(RunReplaced, match="got 'after' in the place of 'before'"):
        store.roles.still_leads(RUN, "before", lease_s=lease)
    with pytest.raises(ReplayError, match="must have one learner, got 'third' while 'after' leads"):
        store.roles.lead(RUN, "third", lease_s=lease)
    assert store.tickets.extend([alive], lease_s=lease) == {}
