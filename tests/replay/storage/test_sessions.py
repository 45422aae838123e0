"""Sessions of agents at rest: node by node while they are under way, as a trajectory once they have ended."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from context.tokens.session_nodes import Node, Status
from context.tokens.session_segments import segments_of
from replay import ReplayError, ReplayStore
from replay.errors import InvalidRecord, RunReplaced
from replay.records import Trajectory
from replay.storage.databases import Location
from replay.storage.format.schema import session_nodes
from replay.storage.read import load
from replay.storage.sessions import OpenSession
from tests.fakes.random_agents import TODAY, random_session
from tests.fakes.records import AUTHORS, RUN, new_store, planned_row, put, sql, trajectory

pytestmark = pytest.mark.every_database

OPENED = OpenSession("session-1", RUN, TODAY.isoformat())
TREES = (random_session(seed).tree.nodes for seed in range(100))
NODES = next(tuple(nodes) for nodes in TREES if len(segments_of(nodes, AUTHORS)) > 3)


def same(found: Sequence[Node], written: Sequence[Node]) -> bool:
    facts = [[replace(node, tokens=NODES[0].tokens) for node in nodes] for nodes in (found, written)]
    alike = all(vars(a) == vars(b) for a, b in zip(*facts, strict=True))
    return alike and all(a.tokens.equals(b.tokens) for a, b in zip(found, written, strict=True))


def row(nodes: Sequence[Node] = NODES, id: str = "row-1") -> Trajectory:
    said = tuple(message for node in nodes for message in node.messages)
    return replace(trajectory(id, segments=(), messages=said, source="gateway"), nodes=tuple(nodes))


def test_what_is_under_way_is_there_as_soon_as_it_was_added(location: Location) -> None:
    with closing(new_store(location)) as store:
        assert store.sessions.open(OPENED) == OPENED
        for node in NODES:
            asked = (OPENED.id, replace(node, status=Status.UNDELIVERED))
            store.sessions.add([asked, asked], [(OPENED.id, node.number)])
    with closing(ReplayStore.open(location)) as store:
        later = replace(OPENED, opened_at="2027-01-01T00:00:00")
        assert (store.sessions.open(later), store.sessions.opened(RUN)) == (OPENED, [OPENED])
        delivered = [replace(node, status=Status.TRAINED) for node in NODES]
        assert same(store.sessions.nodes(OPENED.id), delivered)
        store.sessions.end([OPENED.id])
        assert store.sessions.opened(RUN) == []
        with pytest.raises(ReplayError, match="session must be one that is under way, got 'session-1'"):
            store.sessions.nodes(OPENED.id)


def test_a_process_that_was_replaced_stores_and_ends_no_session(location: Location) -> None:
    with closing(new_store(location)) as old, closing(ReplayStore.open(location)) as new:
        old.sessions.open(OPENED)
        new.resume(RUN, 0)
        new.sessions.add([(OPENED.id, NODES[0])])
        for late in (lambda: old.sessions.add([(OPENED.id, NODES[0])]), lambda: old.sessions.end([OPENED.id])):
            with pytest.raises(RunReplaced, match="was resumed by another one"):
                late()
        assert same(new.sessions.nodes(OPENED.id), NODES[:1])


def test_a_session_that_ended_is_a_row_whose_training_sequences_follow_from_its_nodes(location: Location) -> None:
    with closing(new_store(location)) as store:
        put(store, row())
        (found,) = store.read(["row-1"])
        assert same(found.nodes, NODES)
        assert [s.tokens.equals(w.tokens) for s, w in zip(found.segments, segments_of(NODES, AUTHORS), strict=True)]
        assert found.messages == row().messages
        with store.reading() as connection:
            (unread,) = load(connection, ["row-1"], with_messages=False).in_order(["row-1"])
        assert [len(segment.tokens) for segment in unread.segments] == [len(s.tokens) for s in found.segments]
        assert store.verify().damage == [] and store.verify().corrupt == {}
    sampled = sum(node.num_sampled for node in NODES if node.status == Status.TRAINED)
    got = sql(location, "select num_action_tokens, policy_version_max from trajectories")
    assert got == [(sampled, max(node.tokens.policy_versions.max() for node in NODES))]
    assert sql(location, "select count(*) from segments") == [(0,)]


CHANGES = ("parent = 0, kept_tokens = 1", "kept_tokens = kept_tokens + 1", "status = 'trained'", "agent = 'x'")


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_node_is_found(location: Location, change: str) -> None:
    with closing(new_store(location)) as store:
        put(store, row([*NODES[:-1], replace(NODES[-1], status=Status.ASIDE)]))
        sql(location, f"update nodes set {change} where number = {len(NODES) - 1}")
        assert list(store.verify().corrupt) == ["row-1"]


OTHER = {"status": "'aside'", "fork": "'tools'", "agent": "'x'", "tools": "'x'", "parent": "coalesce(parent, -1) + 1"}
OTHER |= {
    name: f"(select {name} from session_nodes where session = 'session-1' and number = {{}})"
    for name in ("offered", "tokens", "said")
}


def test_each_changed_cell_of_a_session_under_way_is_found(location: Location) -> None:
    """Also where it is one that another node might have."""
    changed = [(c.name, number) for c in session_nodes.c if c.name != "session" for number in (1, 2)]
    with closing(new_store(location)) as store:
        for id in (OPENED.id, *(f"{name} {number}" for name, number in changed)):
            store.sessions.open(replace(OPENED, id=id))
            store.sessions.add([(id, node) for node in NODES])
        for name, number in changed:
            here = f"where session = '{name} {number}' and number = {number}"
            before = sql(location, f"select {name} from session_nodes {here}")
            other = OTHER.get(name, f"{name} + 100").format((number + 1) % len(NODES))
            sql(location, f"update session_nodes set {name} = {other} {here}")
            if name == "number" or sql(location, f"select {name} from session_nodes {here}") != before:
                with pytest.raises(ReplayError, match="must read back as it was written"):
                    store.sessions.nodes(f"{name} {number}")
        assert same(store.sessions.nodes(OPENED.id), NODES)


def with_log_prob(number: int, log_prob: float) -> Trajectory:
    """The row of a session in which the last token of a node has this log-prob."""
    given = planned_row("row-1")
    tokens = given.nodes[number].tokens
    log_probs = np.append(tokens.behavior_log_probs[:-1], np.float32(log_prob))
    changed = replace(given.nodes[number], tokens=replace(tokens, behavior_log_probs=log_probs))
    return replace(given, nodes=(*given.nodes[:number], changed, *given.nodes[number + 1 :]))


def test_a_log_prob_that_was_rounded_above_zero_is_zero_and_a_row_reads_back(location: Location) -> None:
    with closing(new_store(location)) as store:
        put(store, with_log_prob(1, 5e-7))
        assert store.verify().corrupt == {}
        assert store.read(["row-1"])[0].nodes[1].tokens.behavior_log_probs[-1] == 0.0


@pytest.mark.parametrize("number", [1, 5, 6], ids=["trained", "aside", "undelivered"])
@pytest.mark.parametrize("log_prob", [0.5, -np.inf, np.nan])
def test_what_is_no_log_prob_is_refused_in_every_node(location: Location, number: int, log_prob: float) -> None:
    with closing(new_store(location)) as store:
        at = len(planned_row("row-1").nodes[number].tokens) - 1
        with pytest.raises(InvalidRecord, match=rf"nodes\[{number}\].behavior_log_probs\[{at}\] must be finite"):
            put(store, with_log_prob(number, log_prob))
