"""Runs that learn from what failed episodes did solve."""

from __future__ import annotations

import math
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentloop.config import RunConfig
from agentloop.training.from_python.train_result import TrainResult
from agentloop.training.train import train
from context.authors import AuthorTable
from replay.exchange import export_file, import_file
from replay.questions.trajectory import lineage_of
from replay.records import Trajectory
from replay.store import ReplayStore
from tests.fakes.engine_server import serving
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.runs import SilentDisplay, StopAfter, rows, small_config
from tests.fakes.worker_runs import WorkerProgram

pytestmark = pytest.mark.slow

GOALS = ENVIRONMENTS / "goals.py"
HINDSIGHT = {"enable": True, "min_turns": 1, "advantage": 0.75, "window": 2}
REPLAY = {"fraction": 0.5, "sources": {"hindsight": 0.5, "self": 0.5}, "hindsight": HINDSIGHT, "shortfall": "shrink"}


def config(folder: Path, model: Path, environment: str = "Remainder", **sections: Any) -> RunConfig:
    own: dict[str, Any] = {
        "run": {"iterations": 4},
        "environment": {"name": f"{GOALS}:{environment}"},
        "evaluation": {"every": 0, "tasks": 8},
        "checkpoint": {"every": 1, "keep": 10},
    }
    return small_config(folder, model, **{**own, **sections, "replay": {**REPLAY, **sections.get("replay", {})}})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, qwen2: Path) -> TrainResult:
    return train(config(tmp_path_factory.mktemp("runs"), qwen2), display=SilentDisplay())


def stored(run: TrainResult, where: str) -> list[Trajectory]:
    ids = [id for (id,) in rows(run.folder / "replay.sqlite", f"select id from trajectories where {where} order by id")]
    with closing(ReplayStore.open(run.folder / "replay.sqlite", read_only=True)) as store:
        return store.read(ids)


def test_failed_episodes_are_stored_once_more_as_what_they_solved(finished: TrainResult) -> None:
    made = stored(finished, "source = 'hindsight'")
    assert len(made) > 5
    parents = {row.id: row for row in stored(finished, "source = 'self'")}
    authors = AuthorTable.from_json(rows(finished.folder / "replay.sqlite", "select authors from runs")[0][0])
    for row in made:
        record, parent = row.record, parents[str(row.record.parent)]
        assert (record.success, record.reward, record.advantage) == (True, 1.0, 0.75)
        assert not parent.record.success and record.task != parent.record.task
        assert (record.iteration, record.policy_version_min) == (
            parent.record.iteration,
            parent.record.policy_version_max,
        )
        (segment,) = row.segments
        sampled = authors.is_trained(segment.tokens.authors)
        assert segment.behavior_context == "relabelled"
        assert all(map(math.isnan, segment.tokens.behavior_log_probs))
        # Its only reply is the last one of its parent, token by token.
        reply = segment.tokens.token_ids[sampled].tobytes()
        (asked, answer) = row.messages
        assert f"length {len(answer.content) % 5} modulo" in asked.content
        assert answer == parent.messages[-1]
        assert reply in parent.segments[-1].tokens.token_ids.tobytes()


def test_such_rows_are_trained_and_have_no_drift(finished: TrainResult) -> None:
    database = finished.folder / "replay.sqlite"
    query = """select d.drift_mean, d.drift_max, d.ess_share, d.advantage, d.clip_fraction, d.staleness,
               d.iteration - t.iteration from draws d join trajectories t on t.id = d.trajectory
               where t.source = '{}' and d.stream = 'replay'"""
    drawn = rows(database, query.format("hindsight"))
    assert len(drawn) > 5
    for drift, highest, ess, advantage, clipped, staleness, age in drawn:
        assert (drift, highest, ess, advantage) == (None, None, None, 0.75)
        assert clipped is not None and staleness is not None and 1 <= age <= 2
    assert all(drift is not None and ess is not None for drift, _, ess, *_ in rows(database, query.format("self")))


def test_what_was_claimed_and_what_was_made_of_it_are_metrics(finished: TrainResult) -> None:
    database = finished.folder / "replay.sqlite"
    found = dict(rows(database, "select name, sum(value) from metrics where name like 'hindsight/%' group by name"))
    assert found["hindsight/claimed"] >= found["hindsight/rows"] > 0
    assert rows(database, "select count(*) from trajectories where source = 'hindsight'") == [
        (found["hindsight/rows"],)
    ]


def test_lineage_goes_both_ways_and_rows_are_exported_as_they_are(finished: TrainResult, tmp_path: Path) -> None:
    there = stored(finished, "source = 'hindsight'")
    with closing(ReplayStore.open(finished.folder / "replay.sqlite", read_only=True)) as store:
        made, parent = (lineage_of(store, str(id)) for id in (there[0].id, there[0].record.parent))
        assert (made["source"], made["parent"], made["children"]) == ("hindsight", there[0].record.parent, [])
        assert (parent["source"], parent["parent"], parent["children"]) == ("self", None, [there[0].id])
        export_file(store, tmp_path / "rows.jsonl")
    with closing(ReplayStore.create(tmp_path / "other.sqlite")) as other:
        import_file(other, tmp_path / "rows.jsonl", name=None)
        again = other.read([row.id for row in there])
    assert [row.record for row in again] == [row.record for row in there]
    assert {row.segments[0].behavior_context for row in again} == {"relabelled"}
    assert all(one.segments[0].tokens.equals(two.segments[0].tokens) for one, two in zip(there, again, strict=True))


def test_what_the_reward_does_not_confirm_is_not_stored(tmp_path: Path, qwen2: Path) -> None:
    """Of five tasks that it claims one was asked, and failed; one of the other four was solved, if it was one reply."""
    run = train(config(tmp_path, qwen2, "Boastful"), display=SilentDisplay())
    database = run.folder / "replay.sqlite"
    found = dict(rows(database, "select name, sum(value) from metrics where name like 'hindsight/%' group by name"))
    assert found["hindsight/claimed"] == 5 * found["hindsight/rows"] > 0
    assert rows(database, "select min(success), min(reward) from trajectories where source = 'hindsight'") == [(1, 1.0)]


def test_resumed_run_ends_like_the_unbroken_one(finished: TrainResult, tmp_path: Path, qwen2: Path) -> None:
    train(config(tmp_path, qwen2), display=StopAfter(2))
    resumed = train(config(tmp_path, qwen2), resume=True, display=SilentDisplay())
    query = """select d.iteration, d.slot, d.stream, t.source, t.iteration, t.slot, t.content_hash
               from draws d join trajectories t on t.id = d.trajectory order by 1, 2"""
    drawn = rows(resumed.folder / "replay.sqlite", query)
    assert drawn == rows(finished.folder / "replay.sqlite", query)
    assert {source for _, _, _, source, *_ in drawn} == {"self", "hindsight"}


def test_episodes_of_workers_are_stored_once_more_too(tmp_path: Path, qwen2: Path) -> None:
    """Also those of an iteration that a resume takes back, whose own rows are fresh again."""
    with serving(qwen2) as server, WorkerProgram(tmp_path / "small-001", "--concurrency", "4") as worker:
        given = config(
            tmp_path,
            qwen2,
            rollout={"engine": "vllm"},
            engine={"urls": [server.address]},
            loss={"fresh": {"anchor": "behavior"}},
            collection={"by": "workers", "max_staleness": 1},
            checkpoint={"every": 2, "keep": 10},
        )
        train(given, display=StopAfter(3))
        shutil.rmtree(tmp_path / "small-001" / "checkpoints" / "000003")
        run = train(given, resume=True, display=SilentDisplay())
        assert worker.wait() == 0
    database = run.folder / "replay.sqlite"
    made = rows(database, "select iteration, state, attempt, parent from trajectories where source = 'hindsight'")
    assert {(iteration, state, attempt) for iteration, state, attempt, _ in made} == {
        *((iteration, "eligible", 0) for iteration in (1, 2)),
        (3, "orphaned", 0),
        *((iteration, "eligible", 1) for iteration in (3, 4)),
    }
    parents = [parent for _, state, _, parent in made if state == "eligible"]
    assert len(set(parents)) == len(parents) > 5
    query = "select count(*) from draws d join trajectories t on t.id = d.trajectory where t.source = 'hindsight'"
    assert rows(database, query)[0][0] > 5
