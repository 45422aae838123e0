import pytest

from replay import InvalidRecord, ReplayStore
from replay.records import FRESH, DrawRecord
from replay.storage.collecting.fresh_groups import FreshDraw, FreshRequest
from replay.storage.collecting.ticket_records import PlannedBatch, TicketCounts
from replay.storage.format.schema import trajectories
from replay.storage.retention import Capacity
from tests.fakes.records import RUN, draw, iteration_record, measured, policy, sql, task, ticket_counts
from tests.replay.storage.collecting.episodes import claim, close, collect, episode, issue, ticket


def fresh(store: ReplayStore, iteration: int, *, planned_for: int | None = None, staleness: int = 0) -> FreshDraw:
    return store.tickets.draw_fresh(FreshRequest(RUN, iteration, planned_for or iteration, iteration - 1, staleness))


def commit(store: ReplayStore, iteration: int, drawn: FreshDraw) -> None:
    records = [row.draw for row in drawn.rows if row.draw is not None]
    store.commit(iteration_record(iteration, replay=0), measured(records), sampler_state={})
    store.add_policy(policy(iteration))


def states(store: ReplayStore) -> dict[str, str]:
    return dict(sql(store, "select id, state from trajectories order by id"))


def counts(store: ReplayStore) -> TicketCounts:
    found = ticket_counts(store)
    assert found.rows == found.done
    return found


def test_group_is_closed_only_when_all_its_members_have_ended(store: ReplayStore) -> None:
    issue(store, [0], size=3)
    collect(store, 1)
    held = claim(store, count=2)
    assert store.tickets.ended_groups(RUN) == []
    store.tickets.fail([held[0]], "overtime")
    with pytest.raises(InvalidRecord, match=r"groups must be issued ones whose members have all ended, got \[0\]"):
        store.tickets.close_groups(RUN, [0], {"row-0-0": (0.75, None)}, policy_version=0)
    store.tickets.finish([(held[1], episode(held[1], reward=0.0, success=False))])
    with pytest.raises(InvalidRecord, match="advantages must be those of the open rows"):
        store.tickets.close_groups(RUN, [0], {"row-0-0": (0.75, None)}, policy_version=0)
    for _ in range(2):
        advantages = {"row-0-0": (0.75, None), "row-0-2": (-0.75, '{"scout":[0.5,-0.25]}')}
        store.tickets.close_groups(RUN, [0], advantages, policy_version=0)
    assert states(store) == {"row-0-0": "waiting", "row-0-2": "waiting"}
    found = [row.record for row in store.read(["row-0-0", "row-0-2"])]
    assert [(row.advantage, row.rewards_by_agent) for row in found] == [(0.75, {}), (-0.75, {"scout": (0.5, -0.25)})]
    assert sql(store, "select size, success_rate, reward_mean from groups") == [(2, 0.5, 0.5)]
    assert store.verify().damage == []
    assert store.verify().corrupt == {}


def test_no_replay_draw_sees_an_open_or_a_waiting_row(store: ReplayStore) -> None:
    issue(store, [0, 1])
    collect(store, 3)
    close(store, 0)
    assert states(store) == {"row-0-0": "waiting", "row-0-1": "waiting", "row-1-0": "open"}
    assert draw(store, 5, 9) == []
    drawn = fresh(store, 1)
    assert draw(store, 5, 9) == []
    commit(store, 1, drawn)
    drawn_again = draw(store, 5, 9)
    assert {row.trajectory.id for row in drawn_again} == {"row-0-0", "row-0-1"}


def test_groups_of_a_batch_are_fresh_once_in_the_order_of_their_issue(store: ReplayStore) -> None:
    issue(store, [0, 1])
    issue(store, [2], iteration=2)
    collect(store, 6)
    for number in (2, 0, 1):
        close(store, number)
    drawn = fresh(store, 1)
    assert drawn.late == 0
    assert [row.trajectory.id for row in drawn.rows] == ["row-0-0", "row-0-1", "row-1-0", "row-1-1"]
    assert [row.draw for row in drawn.rows][3] == DrawRecord(RUN, 1, 3, "row-1-1", FRESH, None, 0)
    assert [row.advantage for row in drawn.rows] == [0.25] * 4
    again = fresh(store, 1)
    assert [row.draw for row in again.rows] == [row.draw for row in drawn.rows]
    assert counts(store).waiting == 6
    commit(store, 1, again)
    assert (counts(store).fresh, counts(store).waiting) == (4, 2)
    assert [row.trajectory.id for row in fresh(store, 2, staleness=1).rows] == ["row-2-0", "row-2-1"]


@pytest.mark.every_database
@pytest.mark.parametrize(("staleness", "late"), [(1, 2), (2, 0)])
def test_closed_groups_are_fresh_once_or_late(store: ReplayStore, staleness: int, late: int) -> None:
    issue(store, [0, 1])
    for version, number in ((0, 0), (1, 1)):
        collect(store, 2, version=version)
        close(store, number)
    drawn = fresh(store, 3, planned_for=1, staleness=staleness)
    assert (drawn.late, len(drawn.rows)) == (late, 4 - late)
    commit(store, 3, drawn)
    found = counts(store)
    assert (found.fresh, found.late, found.waiting, found.done) == (4 - late, late, 0, 4)
    # Those that were late since are to be fresh again, too.
    assert store.resume(RUN, 2).fresh_again == 4
    assert store.verify().corrupt == {}


def test_batch_is_planned_once_and_says_how_far_it_is(store: ReplayStore) -> None:
    tickets = [ticket(number, member) for number in (0, 1) for member in (0, 1)]
    assert store.tickets.issue([task()], tickets, PlannedBatch(RUN, 1, {"share": 0.5})) == 4
    assert store.tickets.issue([task()], tickets, PlannedBatch(RUN, 1, {"share": 0.25})) == 0
    assert store.tickets.planned(RUN, after=0) == [PlannedBatch(RUN, 1, {"share": 0.5})]
    assert store.tickets.planned(RUN, after=1) == []
    collect(store, 1)
    store.tickets.fail(claim(store), "overtime")
    assert (store.tickets.episodes(RUN, 1), store.tickets.under_way(RUN, 1)) == (4, 2)
    collect(store, 2)
    assert (store.tickets.episodes(RUN, 1), store.tickets.under_way(RUN, 1)) == (4, 0)


def test_row_without_a_trained_token_is_never_fresh_and_counts_as_unused(store: ReplayStore) -> None:
    issue(store, [0])
    collect(store, 1)
    (held,) = claim(store)
    store.tickets.finish([(held, episode(held, trained=False))])
    store.tickets.close_groups(RUN, [0], {"row-0-0": (0.75, None)}, policy_version=0)
    assert [row.trajectory.id for row in fresh(store, 1).rows] == ["row-0-0"]
    assert (counts(store).waiting, counts(store).unused) == (1, 1)


def test_capacity_evicts_no_row_that_is_still_to_be_fresh(store: ReplayStore) -> None:
    for number in range(3):
        issue(store, [number], iteration=1 + number)
    collect(store, 5)
    close(store, 0)
    close(store, 1)
    commit(store, 1, fresh(store, 1))
    store.evict(RUN, 50, Capacity(rows=1, age=1))
    assert list(states(store).values()) == ["evicted", "evicted", "waiting", "waiting", "open"]
    assert counts(store).fresh == 2
    store.purge(RUN, 50)
    assert (counts(store).fresh, counts(store).waiting, counts(store).open) == (2, 2, 1)


def test_what_is_damaged_or_forgotten_before_its_group_is_closed_costs_that_row_alone(store: ReplayStore) -> None:
    issue(store, [0], size=3)
    collect(store, 3)
    sql(store, "update trajectories set reward = 0.125 where id = 'row-0-1'")
    store.forget(trajectories.c.id == "row-0-2", dry_run=False)
    rows = store.tickets.open_rows(RUN, [0])
    store.tickets.close_groups(RUN, [0], {row.id: (0.5, None) for row in rows}, policy_version=0)
    assert [row.trajectory.id for row in fresh(store, 1).rows] == ["row-0-0"]
    assert (counts(store).waiting, counts(store).unused) == (1, 2)
