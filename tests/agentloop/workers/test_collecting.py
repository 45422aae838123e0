"""A worker in a process of its own collects what a learner has issued, whatever happens to it."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from replay import questions
from replay.storage.collecting.ticket_records import EVALUATION
from replay.storage.databases import Location
from tests.fakes.engine_sampling import plain_log_probs
from tests.fakes.engine_server import EngineServer, serving
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.postgres_servers import LocalServer
from tests.fakes.worker_runs import IssuedRun, WorkerProgram, issued_run, stop_between_writes, worker_config

pytestmark = pytest.mark.slow

FAILING = ENVIRONMENTS / "parity.py"
FUNCTIONS = ENVIRONMENTS / "functions.py"


Begin = Callable[..., tuple[IssuedRun, EngineServer]]


@pytest.fixture
def begin(tmp_path: Path, qwen2: Path) -> Iterator[Begin]:
    """Begins a run with an engine."""
    with ExitStack() as stack:

        def begun(location: Location, **sections: dict[str, object]) -> tuple[IssuedRun, EngineServer]:
            server = stack.enter_context(serving(qwen2))
            config = worker_config(tmp_path / "runs", qwen2, server, location, **sections)
            return stack.enter_context(issued_run(config)), server

        yield begun


def rows_of(run: IssuedRun) -> list[str]:
    """The ids of all rows that ended tickets name."""
    groups = run.store.tickets.ended_groups(run.id)
    return [member.trajectory for group in groups for member in group.members if member.trajectory is not None]


def test_rows_have_the_tokens_versions_and_log_probs_of_the_engine(begin: Begin, location: Location) -> None:
    run, server = begin(location, evaluation={"temperature": 0.25, "every": 2, "tasks": 8})
    run.issue(2)
    run.issue_evaluation(6)
    with WorkerProgram(run.folder, "--concurrency", "8") as worker:
        counts = run.until_ended(worker)
        assert (counts.done, counts.open, counts.rows) == (32, 32, 32)
        assert len(set(rows_of(run))) == 32
        for row in run.store.read(rows_of(run)):
            assert (row.record.policy_version_min, row.record.policy_version_max) == (0, 0)
            assert (row.record.temperature, row.record.iteration) == (0.7, 1 + row.record.slot // 16)
            for segment in row.segments:
                tokens = segment.tokens
                sampled = tokens.policy_versions >= 0
                ids = tokens.token_ids.tolist()
                scored = np.array([np.nan, *plain_log_probs(server.models.model, ids[:1], ids[1:], 0.7)])
                assert sampled.any() and not np.isnan(tokens.behavior_log_probs[sampled]).any()
                assert np.abs(tokens.behavior_log_probs - scored)[sampled].max() < 1e-4
        outcomes = [one.outcome for each in run.store.tickets.ended_groups(run.id, EVALUATION) for one in each.members]
        names = {"success", "reward", "turns", "num_tool_calls", "stop_reason", "problem"}
        assert len(outcomes) == 6 and all(outcome and names == outcome.keys() for outcome in outcomes)
        kept = questions.held_out(run.store, run.id)["rows"]
        assert [row["success"] for row in kept] == [outcome["success"] for outcome in outcomes if outcome]
        asked = [body["sampling_params"]["temperature"] for body in server.requests]
        assert asked.count(0.25) >= 6 and asked.count(0.7) >= 32
        run.store.roles.end_run(run.id)
        assert worker.wait() == 0
    assert run.store.roles.listed("worker", run.id) == []


@pytest.mark.parametrize(("asked", "mood"), [(signal.SIGTERM, ""), (signal.SIGINT, "endless")])
def test_a_worker_that_is_asked_to_stop_gives_back_what_it_holds(
    begin: Begin, tmp_path: Path, asked: signal.Signals, mood: str
) -> None:
    """Also where its episodes never end."""
    environment = {"name": f"{FAILING}:Moody"}
    run, server = begin(tmp_path / "replay.sqlite", collection={"lease_s": 600.0}, environment=environment)
    server.models.pace_s = 0.2
    run.issue(2)
    with WorkerProgram(run.folder, "--concurrency", "6", place={"AGENTLOOP_TEST_MOOD": mood}) as worker:
        run.until(lambda counts: counts.leased == 6, worker)
        worker.send(asked)
        assert worker.wait() == 128 + asked
    counts = run.counts
    assert (counts.leased, counts.queued + counts.done) == (0, 32)
    assert run.store.roles.listed("worker", run.id) == []
    # No try is counted: the first claim of another is the first of all.
    claims = run.store.tickets.claim(run.id, "other", count=32, lease_s=1.0)
    assert {claim.tries for claim in claims} == {1}


def test_a_worker_stopped_past_its_leases_counts_once(begin: Begin, location: Location) -> None:
    run, server = begin(location)
    server.models.pace_s = 0.1
    run.issue(2)
    with WorkerProgram(run.folder, "--concurrency", "16") as first:
        run.until(lambda counts: counts.leased == 16, first)
        stop_between_writes(first.id, location)
        with WorkerProgram(run.folder) as second:
            run.until_ended(second)
            first.send(signal.SIGCONT)
            run.store.roles.end_run(run.id)
            assert (first.wait(), second.wait()) == (0, 0)
    counts = run.counts
    assert (counts.done, counts.rows, len(set(rows_of(run)))) == (32, 32, 32)


def test_an_engine_is_asked_nothing_while_published_to_and_tokens_keep_versions(begin: Begin, tmp_path: Path) -> None:
    run, server = begin(tmp_path / "replay.sqlite")
    server.models.pace_s = 0.4  # between three pieces of a reply
    run.report_engine(state="publishing")
    total, before = run.issue(2), len(server.requests)
    with WorkerProgram(run.folder) as worker:
        worker.says("collecting for")
        while not run.store.roles.listed("worker", run.id):
            time.sleep(0.05)
        time.sleep(1.0)
        # The one token by which a worker finds out what the server can.
        assert (run.counts.queued, len(server.requests) - before) == (total, 1)
        run.components.publisher.publish(1)
        run.until(lambda counts: counts.leased == 32 and server.models.running > 0, worker)
        time.sleep(0.6)
        run.components.publisher.publish(2)
        counts = run.until_ended(worker)
    assert (counts.done, counts.failed) == (32, 0)
    spans = {(row.record.policy_version_min, row.record.policy_version_max) for row in run.store.read(rows_of(run))}
    assert spans <= {(1, 1), (1, 2), (2, 2)} and (1, 2) in spans


def test_a_task_that_ends_its_process_fails_alone_after_three_tries(begin: Begin, tmp_path: Path) -> None:
    run, _ = begin(tmp_path / "replay.sqlite", environment={"name": f"{FAILING}:Moody"})
    run.issue(1)
    deaths = 0
    while not run.has_ended:
        with WorkerProgram(run.folder, place={"AGENTLOOP_TEST_MOOD": "poison"}) as worker:
            while not run.has_ended and not worker.ended:
                time.sleep(0.05)
            deaths += worker.ended
        assert deaths <= 40
    groups = run.store.tickets.ended_groups(run.id)
    reasons = [{member.reason for member in group.members} for group in groups]
    poisoned = [reason for reason in reasons if reason != {None}]
    assert poisoned == [{"3 workers claimed it, and none of them answered"}] * len(poisoned)
    assert 0 < len(poisoned) < 4 and run.counts.failed == 4 * len(poisoned)


def test_a_worker_on_which_nothing_goes_well_leaves_the_tickets_to_others(begin: Begin, tmp_path: Path) -> None:
    run, _ = begin(tmp_path / "replay.sqlite", environment={"name": f"{FAILING}:Moody"})
    run.issue(2)
    with WorkerProgram(run.folder, "--concurrency", "8", place={"AGENTLOOP_TEST_MOOD": "unstarted"}) as sick:
        assert sick.wait() == 2
    assert "episodes must not fail by errors on this worker, got 8 in a row, the last with UserError" in sick.output
    assert run.counts.failed == 8
    with WorkerProgram(run.folder) as well:
        run.until_ended(well)
    assert run.counts.done == 24


def test_functions_in_files_are_tools_and_judges_and_unrewarded_episodes_fail(begin: Begin, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"Say {number}.", "store": {}}) + "\n" for number in range(40)))
    run, _ = begin(
        tmp_path / "shared.sqlite",
        environment={"name": "rows", "tools": [f"{FUNCTIONS}:look"]},
        reward={"functions": [f"{FUNCTIONS}:even", {"function": f"{FAILING}:unlucky"}]},
        tasks={"data": str(data)},
    )
    run.issue(1)
    with WorkerProgram(run.folder) as worker:
        counts = run.until_ended(worker)
    (reason,) = {m.reason for group in run.store.tickets.ended_groups(run.id) for m in group.members} - {None}
    assert counts.done and counts.failed
    assert reason is not None and reason.startswith("reward.functions: LookupError: no reward for this one")


def test_an_ended_episode_outlives_a_crash_of_the_database(begin: Begin, own_server: LocalServer) -> None:
    run, server = begin(own_server.url(own_server.new_database()), collection={"lease_s": 600.0})
    server.models.pace_s = 0.05
    run.issue(2)
    with WorkerProgram(run.folder) as worker:
        run.until(lambda counts: counts.leased == 32, worker)
        own_server.crash()
        time.sleep(2.0)
        own_server.start()
        counts = run.until_ended(worker)
        worker.send(signal.SIGTERM)
        worker.wait()
    # Nobody else has claimed a ticket, and none is claimed twice while its lease lasts.
    assert (counts.done, counts.failed, counts.rows) == (32, 0, 32)
