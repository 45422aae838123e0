"""How often a worker looks at its run (a large cluster leaves the database in peace), whom it asks, what it holds."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agentloop.engines import Completion, GenerationRequest
from agentloop.engines.remote.engine_client import RemoteEngine
from agentloop.engines.remote.server_facts import ask_server
from agentloop.workers.run_view import ListedEngines, RunPoller
from agentloop.workers.worker import HeldClaims
from replay import ReplayStore
from replay.records import TaskRecord
from replay.storage.collecting.ticket_records import Claim, Participant, TicketRecord
from tests.fakes.engine_sampling import replies_of
from tests.fakes.engine_server import EngineServer, serving
from tests.fakes.records import RUN, new_store, sql

LEASE_S = 60.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ReplayStore]:
    with closing(new_store(tmp_path / "replay.sqlite")) as store:
        yield store


def report_many(store: ReplayStore, workers: int) -> None:
    store.roles.report("worker", RUN, "w-0", {})
    numbers = "with recursive n(i) as (select 1 union all select i + 1 from n where i < ?) "
    others = "select run, id || i, facts, started_at, seen_at from workers, n"
    if workers > 1:
        sql(store, f"{numbers} insert into workers (run, id, facts, started_at, seen_at) {others}", workers - 1)


@pytest.mark.parametrize(
    ("workers", "busy", "pause_s"),
    [
        (1, False, 0.25),
        (5, False, 0.25),
        (50, False, 2.5),  # 20 looks a second of all of them
        (100, True, 0.25),
        (200, True, 0.5),  # 400 looks a second
        (1_500, False, 45.0),  # never longer than three quarters of the lease
    ],
)
def test_workers_of_a_large_cluster_look_rarely(store: ReplayStore, workers: int, busy: bool, pause_s: float) -> None:
    report_many(store, workers)
    looks = RunPoller(store, RUN, "w-0", lease_s=LEASE_S)
    looks.report({})
    assert looks.pause_s(busy=busy) == pause_s
    sql(store, "update workers set seen_at = seen_at - 61")  # those that are gone slow nobody down
    looks.report({})
    assert not looks.look().has_ended
    assert looks.pause_s(busy=False) == 0.25
    store.roles.end_run(RUN)
    assert looks.look().has_ended


def test_a_report_is_due_a_third_of_a_lease_after_the_last_one(store: ReplayStore) -> None:
    looks = RunPoller(store, RUN, "w-0", lease_s=LEASE_S)
    assert looks.report_is_due
    looks.report({"state": "waiting"})
    assert not looks.report_is_due
    assert [each.facts for each in store.roles.listed("worker", RUN)] == [{"state": "waiting"}]
    hasty = RunPoller(store, RUN, "w-1", lease_s=0.0)
    hasty.report({})
    assert hasty.report_is_due


@pytest.fixture(scope="module")
def servers(qwen2: Path) -> Iterator[tuple[EngineServer, EngineServer]]:
    with serving(qwen2) as one, serving(qwen2) as other:
        yield one, other


def connected(servers: tuple[EngineServer, EngineServer]) -> RemoteEngine:
    facts = [ask_server(server.address, key=None) for server in servers]
    models = servers[0].models
    stop_ids = frozenset(models.model.generation_config.eos_token_id)  # type: ignore[arg-type, union-attr]
    return RemoteEngine(facts, key=None, stop_ids=stop_ids, vocab_size=models.vocabulary)


def reported(server: EngineServer, version: int, state: str = "serving") -> Participant:
    server.models.label = f"run@{version}"
    facts = {"version": version, "label": f"run@{version}", "adapter": None, "state": state}
    return Participant(server.address, facts, 1.0, 0.1)


def replies(engine: RemoteEngine, count: int) -> list[Completion]:
    found = replies_of(engine, [GenerationRequest(n, [5, 9, 2], 2) for n in range(count)])
    return [reply for reply in found if isinstance(reply, Completion)]


def test_only_the_engine_that_is_not_published_to_is_asked(servers: tuple[EngineServer, EngineServer]) -> None:
    engine = connected(servers)
    listed = ListedEngines(engine)
    assert not listed.any_serves
    listed.update([reported(servers[0], 3), reported(servers[1], 4)])
    assert {reply.policy_version for reply in replies(engine, 12)} == {3, 4}
    listed.update([reported(servers[0], 3), reported(servers[1], 5, "publishing")])
    before = len(servers[1].requests)
    assert {reply.policy_version for reply in replies(engine, 12)} == {3}
    assert len(servers[1].requests) == before
    listed.update([reported(servers[0], 3)])
    assert {reply.policy_version for reply in replies(engine, 12)} == {3}
    listed.update(
        [Participant("http://elsewhere:1", {"version": 1, "label": "a", "adapter": None, "state": "serving"}, 1, 1)]
    )
    assert not listed.any_serves


def claim(number: int, tries: int) -> Claim:
    return Claim(TicketRecord("run", number, 0, "task", 1), TaskRecord("task", "here", {}), "me", tries, tries)


def test_a_ticket_in_its_last_try_waits_until_nothing_else_is_held() -> None:
    """It has ended two workers: others are to lose no try by it."""
    held = HeldClaims(4)
    assert held.wanted == 4
    last = claim(2, 3)
    taken, returned = held.add([claim(0, 1), claim(1, 2), last])
    assert ([each.place for each in taken], returned) == ([(0, 0), (1, 0)], [last])
    assert held.wanted == 0
    held.drop([(0, 0), (1, 0)])
    assert held.wanted == 1
    assert held.add([last]) == ([last], [])
    assert (held.wanted, len(held)) == (0, 1)
    held.drop([last.place])
    assert (held.wanted, len(held)) == (4, 0)
    assert held.add([last, claim(3, 3)]) == ([last], [claim(3, 3)])  # of several, one
    held.drop([last.place])
    held.add([claim(5, 1)])
    assert held.wanted == 3  # room was made, and it claims on
