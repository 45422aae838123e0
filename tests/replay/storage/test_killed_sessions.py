"""Sessions of random agents, node by node through a database whose process is killed now and then."""

import random
from contextlib import closing
from dataclasses import replace

import pytest

from context.tokens.session_nodes import Status
from replay import ReplayStore
from replay.storage.databases import Location
from replay.storage.sessions import OpenSession
from tests.context.test_conversation_tree import SOAK, check
from tests.fakes.random_agents import TODAY, RandomSession, random_session, tree_of
from tests.fakes.records import RUN, group, new_store, session_row, sql, task
from tests.replay.storage.test_sessions import same


def killed_and_gone_on(store: ReplayStore, seed: int) -> tuple[RandomSession, set[int]]:
    """A random session whose process is killed now and then, and whose tree is then made of what is stored; and the
    replies of which the agent had been given when nobody had stored that yet."""
    chance, id = random.Random(seed), f"session-{seed}"
    store.sessions.open(OpenSession(id, RUN, TODAY.isoformat()))
    stored = told = 0
    lost: set[int] = set()

    def before(session: RandomSession) -> None:
        nonlocal stored, told
        killed, new = chance.random() < 0.3, session.tree.nodes[stored:]
        if killed and new and chance.random() < 0.5 and new[-1].number not in session.given:
            del session.sampled[new.pop().number]  # nobody was given it
        for node in new:
            earlier = [(id, number) for number in session.given[told:] if number != node.number]
            store.sessions.add([(id, replace(node, status=Status.UNDELIVERED))], earlier)
            told += len(earlier)
        if killed:
            lost.update(session.given[told:])
            told = len(session.given)
            session.tree = tree_of(session.model, nodes=store.sessions.nodes(id))
        stored = len(session.tree.nodes)

    return random_session(seed, before=before), lost


def check_seeds(location: Location, seeds: range) -> None:
    """What is stored is what was sampled; what was given is trained, each token once, and nothing else is."""
    with closing(new_store(location)) as store:
        store.append([task()], [group()], [])
        for seed in seeds:
            session, lost = killed_and_gone_on(store, seed)
            nodes, given = session.tree.nodes, set(session.given)
            trained = {node.number for node in nodes if node.is_trained}
            gone_on = {node.place.parent for node in nodes if node.place.fork is None}
            assert given - (lost - gone_on) <= trained <= given, seed
            if trained:
                store.append([], [], [session_row(f"row-{seed}", nodes=nodes)])
                (found,) = store.read([f"row-{seed}"])
                assert same(found.nodes, nodes)
                check(replace(session, tree=tree_of(session.model, nodes=found.nodes)))
            store.sessions.end([f"session-{seed}"])
    assert sql(location, "select count(*) from session_nodes") == [(0,)]


@pytest.mark.every_database
def test_what_was_given_is_trained_whatever_is_killed(location: Location) -> None:
    check_seeds(location, range(6))


@pytest.mark.parametrize("seeds", [range(6, 40), pytest.param(range(40, 2000), marks=SOAK)], ids=str)
def test_many_sessions_whose_process_is_killed_are_stored_and_trained_exactly(location: Location, seeds: range) -> None:
    check_seeds(location, seeds)
