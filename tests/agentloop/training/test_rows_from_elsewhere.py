"""Runs that learn from more than their own episodes: other buffers, conversations, what failed episodes did solve."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from agentloop.config import RunConfig
from agentloop.errors import UserError
from agentloop.training.train import TrainResult, train
from replay.exchange import ExchangeError
from tests.fakes.engine_server import serving
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.runs import SilentDisplay, StopAfter, rows, save_llama, small_config
from tests.fakes.worker_runs import WorkerProgram

pytestmark = pytest.mark.slow

DRAWN = (
    "select count(*) from draws d join trajectories t on t.id = d.trajectory "
    "where d.stream = 'replay' and d.state = 'committed' and t.source = '{}'"
)


def short(folder: Path, model: Path, **sections: dict[str, Any]) -> RunConfig:
    run = {"iterations": 1, **sections.pop("run", {})}
    return small_config(folder, model, evaluation={"every": 0, "tasks": 4}, run=run, **sections)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, qwen2: Path) -> Path:
    """A run of one iteration, 16 trajectories."""
    old = {"replay": {"anchor": "old"}}
    return train(short(tmp_path_factory.mktemp("first"), qwen2, loss=old), display=SilentDisplay()).folder


def test_rows_of_an_attached_buffer_are_drawn_and_their_lineage_holds(first: Path, tmp_path: Path, qwen2: Path) -> None:
    replay = {"fraction": 0.25, "sampler": "uniform", "successful_only": False, "attach": {"earlier": str(first)}}
    display = SilentDisplay()
    before = (first / "replay.sqlite").read_bytes()
    result = train(short(tmp_path, qwen2, replay=replay), display=display)
    database = result.folder / "replay.sqlite"
    # The first iteration has no rows of its own yet: its 4 replayed ones are the other run's.
    assert rows(database, DRAWN.format("earlier")) == [(4,)]
    assert f"attached {first} as earlier: 16 rows, 16 of them copied now" in display.notes
    assert rows(database, "select source, count(*) from trajectories group by 1") == [("earlier", 16), ("self", 12)]
    assert rows(database, "select distinct staleness from draws where stream = 'replay'") == [(None,)]
    assert rows(database, "pragma foreign_key_check") == []
    assert (first / "replay.sqlite").read_bytes() == before


def test_that_nothing_is_drawn_of_an_attached_buffer_is_said(first: Path, tmp_path: Path, qwen2: Path) -> None:
    display = SilentDisplay()
    train(short(tmp_path, qwen2, replay={"fraction": 0.0, "attach": {"earlier": str(first)}}), display=display)
    assert "replay.fraction is 0, so no row of replay.attach or replay.sources is drawn. Set it." in display.notes


def test_a_buffer_of_another_tokenizer_is_refused(first: Path, tmp_path: Path) -> None:
    llama = save_llama(tmp_path / "llama")
    with pytest.raises(ExchangeError, match="replay.attach.x must hold rows that this run can learn from, got none"):
        train(short(tmp_path / "runs", llama, replay={"attach": {"x": str(first)}}), display=SilentDisplay())
    assert list((tmp_path / "runs").iterdir()) == []


CHAT = [
    {"messages": [{"role": "user", "content": "Is 3 odd?"}, {"role": "assistant", "content": text}], "reward": reward}
    for text, reward in (("odd", 1.0), ("even", 0.0))
]


def test_conversations_of_an_attached_file_are_trained_on_with_anchor_old_alone(tmp_path: Path, qwen2: Path) -> None:
    file, display = tmp_path / "chat.jsonl", SilentDisplay()
    file.write_text("".join(json.dumps(row) + "\n" for row in CHAT))
    replay = {"fraction": 0.125, "sampler": "uniform", "successful_only": False, "attach": {"teacher": str(file)}}
    config = short(tmp_path, qwen2, loss={"replay": {"anchor": "old"}}, replay=replay)
    database = train(config, display=display).folder / "replay.sqlite"
    assert f"attached {file} as teacher: 2 rows, 2 of them copied now" in display.notes
    assert rows(database, DRAWN.format("teacher")) == [(2,)]
    assert rows(database, "select count(*) from iterations where optimizer_steps > 0") == [(1,)]
    file.write_text(json.dumps(CHAT[0]) + "\n" + json.dumps({"messages": CHAT[1]["messages"]}) + "\n")
    with pytest.raises(ExchangeError, match=f"^{file}:2: row must hold a reward, got none"):
        train(config, display=SilentDisplay())
    file.unlink()
    again = {**config.model_dump(), "run": {**config.run.model_dump(), "iterations": 2}}
    assert train(RunConfig.model_validate(again), display=SilentDisplay(), resume=True).iterations == 2
    file.write_text(json.dumps(CHAT[0]) + "\n")
    with pytest.raises(UserError, match="^behavior_log_probs of trajectory .* must be known for every trained token"):
        train(short(tmp_path, qwen2, replay=replay), display=SilentDisplay())


GOALS = ENVIRONMENTS / "parity.py"
HINDSIGHT = {"enable": True, "min_turns": 1, "advantage": 0.75, "window": 2}
REPLAY = {"fraction": 0.5, "sources": {"hindsight": 0.5, "self": 0.5}, "hindsight": HINDSIGHT, "shortfall": "shrink"}


def relabelling(folder: Path, model: Path, environment: str = "Remainder", **sections: Any) -> RunConfig:
    own: dict[str, Any] = {
        "run": {"iterations": 4},
        "environment": {"name": f"{GOALS}:{environment}"},
        "evaluation": {"every": 0, "tasks": 8},
        "replay": REPLAY,
    }
    return small_config(folder, model, **{**own, **sections})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, qwen2: Path) -> TrainResult:
    return train(relabelling(tmp_path_factory.mktemp("runs"), qwen2), display=SilentDisplay())


def test_such_rows_are_trained_and_have_no_drift(finished: TrainResult) -> None:
    database = finished.folder / "replay.sqlite"
    query = """select d.drift_mean, d.token_gap_max, d.ess_share, d.advantage, d.clip_fraction, d.staleness,
               d.iteration - t.iteration from draws d join trajectories t on t.id = d.trajectory
               where t.source = '{}' and d.stream = 'replay'"""
    drawn = rows(database, query.format("hindsight"))
    assert len(drawn) > 5
    for drift, highest, ess, advantage, clipped, staleness, age in drawn:
        assert (drift, highest, ess, advantage) == (None, None, None, 0.75)
        assert clipped is not None and staleness is not None and 1 <= age <= 2
    assert all(drift is not None and ess is not None for drift, _, ess, *_ in rows(database, query.format("self")))


@pytest.mark.parametrize(("environment", "claims"), [("Remainder", 1), ("Boastful", 5)])
def test_only_what_the_reward_confirms_is_stored(
    finished: TrainResult, tmp_path: Path, qwen2: Path, environment: str, claims: int
) -> None:
    """The boastful one claims five tasks: one was asked, and failed; one of the others was solved, if in one reply."""
    boasts = environment == "Boastful"
    run = train(relabelling(tmp_path, qwen2, environment), display=SilentDisplay()) if boasts else finished
    database = run.folder / "replay.sqlite"
    found = dict(rows(database, "select name, sum(value) from metrics where name like 'hindsight/%' group by name"))
    assert found["hindsight/claimed"] >= claims * found["hindsight/rows"] > 0
    stored = rows(database, "select count(*), min(success), min(reward) from trajectories where source = 'hindsight'")
    assert stored == [(found["hindsight/rows"], 1, 1.0)]


def test_episodes_of_workers_are_stored_once_more_too(tmp_path: Path, qwen2: Path) -> None:
    """Also those of an iteration that a resume takes back, whose own rows are fresh again."""
    with serving(qwen2) as server, WorkerProgram(tmp_path / "small-001", "--concurrency", "4") as worker:
        given = relabelling(
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
