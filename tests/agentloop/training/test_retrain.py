"""`agentloop replay retrain`: a checkpoint and the recorded draws give a run's weights, bit by bit."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from agentloop.cli.main import app
from agentloop.config import RunConfig
from agentloop.errors import UserError
from agentloop.runs.run_folder import open_run_folder
from agentloop.training.retrain.retraining import Retrained, retrain
from agentloop.training.train import train
from replay.store import ReplayStore
from tests.fakes.engine_server import serving
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.records import sql
from tests.fakes.runs import PARITY, SilentDisplay, StopAfter, rows, save_qwen2, small_config
from tests.fakes.worker_runs import WorkerProgram

WEIGHTED = {"fraction": 0.5, "sampler": "advantage"}
"""By the size of the advantage, corrected by importance weights."""


def settings(folder: Path, model: Path, algorithm: str = "grpo", **sections: dict[str, Any]) -> RunConfig:
    """Three iterations of 16 short episodes with a checkpoint of each, with clipped and unclipped rows."""
    own: dict[str, dict[str, Any]] = {
        "rollout": {"max_turns": 1, "max_tokens_per_turn": 12},
        "batch": {"ppo_epochs": 2},
        "replay": {"fraction": 0.5},
        "optimizer": {"learning_rate": 5e-4},
        "evaluation": {"every": 0, "tasks": 1},
        "checkpoint": {"every": 1, "keep": 10, "keep_policies": "none"},
    }
    merged = {name: {**own.get(name, {}), **sections.get(name, {})} for name in {*own, *sections}}
    return small_config(folder, model, algorithm, **merged)


def again(run: Path, start: int = 0, end: int | None = None) -> Retrained:
    store = ReplayStore.open(run / "replay.sqlite", read_only=True)
    try:
        return retrain(store, open_run_folder(run), start=start, end=end, display=SilentDisplay())
    finally:
        store.close()


def differing(found: Retrained) -> list[tuple[int, bool]]:
    """(iteration, whether its weights differ)"""
    return [(each.iteration, each.differing > 0) for each in found.compared]


def files_of(folder: Path) -> dict[str, str]:
    """Every file by its hash, but those that SQLite makes for whoever reads."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".sqlite-shm", ".sqlite-wal")]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def command(*words: object) -> Result:
    return CliRunner().invoke(app, ["replay", "retrain", *map(str, words)])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, qwen2: Path) -> Path:
    """A run whose draws have importance weights."""
    return train(settings(tmp_path_factory.mktemp("runs"), qwen2, replay=WEIGHTED), display=SilentDisplay()).folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "small-001"))


def test_a_run_is_retrained_bit_by_bit_and_nothing_of_it_is_written(finished: Path) -> None:
    weights = rows(finished / "replay.sqlite", "select count(distinct weight) from draws where stream = 'replay'")
    assert weights >= [(2,)]
    before = files_of(finished)
    result = command(finished, "--from", 0)
    assert (result.exit_code, files_of(finished)) == (0, before)
    assert [line.split()[:2] + line.split()[3:] for line in result.stdout.splitlines()[1:4]] == [
        [str(iteration), f"checkpoints/00000{iteration}", "equal"] for iteration in (1, 2, 3)
    ]
    assert result.stdout.splitlines()[-1] == "weights retrained from checkpoints/000000: equal bit by bit"


POOL = {"name": PARITY, "task_pool": 4}
FLAT = {"group_size": 2}
"""Groups of two are often of equal rewards."""


@pytest.mark.parametrize(
    ("algorithm", "sections"),
    [
        ("grpo", {"replay": {"sampler": "recency"}, "kl": {"loss_coef": 0.05}}),
        ("grpo", {"replay": {"fraction": 0.0}, "kl": {"reward_coef": 0.05, "target": 0.01}}),
        ("grpo", {"replay": {"negative_weight": 0.5, "capacity": {"rows": 12}}, "batch": {"layout": "packed"}}),
        ("grpo", {"replay": {"mode": "observe"}, "advantage": {"normalise_batch": "whiten"}}),
        ("grpo", {"replay": {"unit": "any"}, "batch": FLAT, "rollout": {"dynamic_sampling_rounds": 2}}),
        ("grpo", {"environment": POOL, "replay": {"complete_zero_variance": True}, "batch": FLAT}),
        ("grpo", {"environment": POOL, "replay": {"baseline": "shared"}, "kl": {"reward_coef": 0.05}}),
        ("rloo", {"lora": {"rank": 2}, "kl": {"loss_coef": 0.05}}),
        ("reinforce++", {"optimizer": {"schedule": "linear"}, "compute": {"old_log_probs": "recompute"}}),
        ("ppo", {"kl": {"reward_coef": 0.05, "target": 0.01}, "critic": {"train_on": "both"}}),
        ("ppo", {"critic": {"backbone": "shared", "warmup_iterations": 1}}),
    ],
)
def test_every_kind_of_run_is_retrained_bit_by_bit(
    tmp_path: Path, qwen2: Path, algorithm: str, sections: dict[str, Any]
) -> None:
    result = train(settings(tmp_path, qwen2, algorithm, **sections), display=SilentDisplay())
    assert differing(again(result.folder)) == [(1, False), (2, False), (3, False)]
    assert differing(again(result.folder, start=1, end=2)) == [(2, False)]


def test_turns_get_their_credit_again(tmp_path: Path, qwen2: Path) -> None:
    """No episode is answered, so what is learned comes from the rewards of turns alone."""
    config = settings(
        tmp_path,
        qwen2,
        environment={"name": PARITY.replace("Parity", "ByTurn"), "task_pool": 4},
        context={"parser": f"{ENVIRONMENTS / 'parity.py'}:Pondering"},
        rollout={"max_turns": 3},
        advantage={"credit": "turn", "turn_gamma": 0.9},
        replay={"unit": "trajectory", "baseline": "shared", "negative_weight": 0.5},
    )
    run = train(config, display=SilentDisplay()).folder
    assert rows(run / "replay.sqlite", "select distinct advantage from draws") == [(0.0,)]
    assert differing(again(run)) == [(1, False), (2, False), (3, False)]


def test_a_resumed_run_is_retrained_across_its_break(tmp_path: Path, qwen2: Path) -> None:
    config = settings(tmp_path, qwen2, run={"iterations": 4}, checkpoint={"every": 2})
    train(config, display=StopAfter(3))
    shutil.rmtree(tmp_path / "small-001" / "checkpoints" / "000003")
    run = train(config, resume=True, display=SilentDisplay()).folder
    assert differing(again(run)) == [(2, False), (4, False)]


@pytest.mark.parametrize(("staleness", "samples_per_insert"), [(1, None), (3, 4.0)])
def test_a_run_that_workers_collected_is_retrained_across_its_break(
    tmp_path: Path, qwen2: Path, staleness: int, samples_per_insert: float | None
) -> None:
    """Which rows were there in time differs from run to run; what the draws recorded of it gives the weights."""
    with serving(qwen2) as server, WorkerProgram(tmp_path / "small-001", "--concurrency", "4") as worker:
        server.models.pace_s = 0.3  # so that a learner that may go on without fresh rows does
        config = settings(
            tmp_path,
            qwen2,
            run={"iterations": 6},
            batch={"ppo_epochs": 1},
            rollout={"engine": "vllm", "temperature": 0.7},
            engine={"urls": [server.address]},
            loss={"fresh": {"anchor": "behavior"}},
            collection={"by": "workers", "max_staleness": staleness, "samples_per_insert": samples_per_insert},
        )
        train(config, display=StopAfter(2))
        run = train(config, resume=True, display=SilentDisplay()).folder
        assert worker.wait() == 0
    drawn = rows(run / "replay.sqlite", "select iteration, max(staleness) from draws where stream = 'fresh' group by 1")
    assert max(age for _, age in drawn) > 0
    assert (len(drawn) < 6) == (samples_per_insert is not None)
    assert differing(again(run)) == [(iteration, False) for iteration in range(1, 7)]
    result = command(run, "--from", 4)
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (
        0,
        "weights retrained from checkpoints/000004: equal bit by bit",
    )


def test_a_run_whose_replies_an_engine_sampled_needs_none_to_be_retrained(tmp_path: Path) -> None:
    """The embeddings are the head, too: of a published policy it is written by itself."""
    model = save_qwen2(tmp_path / "model", tied=True)
    with serving(model) as server:
        config = settings(
            tmp_path,
            model,
            rollout={"engine": "vllm", "temperature": 0.7},
            engine={"urls": [server.address], "restart_timeout_s": 0},
            checkpoint={"every": 100, "keep_policies": "all"},
        )
        run = train(config, display=SilentDisplay()).folder
    found = again(run)
    assert [each.stored for each in found.compared] == ["policies/000001", "policies/000002", "checkpoints/000003"]
    assert found.equal


def test_kept_policies_are_compared_where_there_is_no_checkpoint(tmp_path: Path, qwen2: Path) -> None:
    config = settings(tmp_path, qwen2, checkpoint={"every": 100, "keep_policies": "all"})
    run = train(config, display=SilentDisplay()).folder
    found = again(run)
    assert [each.stored for each in found.compared] == ["policies/000001", "policies/000002", "checkpoints/000003"]
    assert found.equal


def swap_rows(database: Path, *slots: int) -> None:
    """Each gets the trajectory of the other in iteration 2, and keeps its advantage."""
    ids = [sql(database, "select trajectory from draws where iteration = 2 and slot = ?", slot)[0][0] for slot in slots]
    for slot, id in zip(reversed(slots), ids, strict=True):
        sql(database, "update draws set trajectory = ? where iteration = 2 and slot = ?", id, slot)


@pytest.mark.parametrize("what", ["advantage", "weight", "rows"])
def test_what_was_changed_in_the_record_is_found(copied: Path, what: str) -> None:
    database = copied / "replay.sqlite"
    if what == "rows":
        different = """select a.slot, b.slot from draws a join draws b on a.iteration = b.iteration
                       where a.iteration = 2 and a.advantage > 0 and b.advantage < 0"""
        swap_rows(database, *rows(database, different)[0])
    elif what == "weight":
        sql(database, "update draws set weight = 0.3 * weight where iteration = 2 and stream = 'replay'")
    else:
        sql(database, "update draws set advantage = advantage + 0.5 where iteration = 2 and slot = 0")
    found = again(copied)
    assert differing(found) == [(1, False), (2, True), (3, True)]
    assert found.compared[1].largest > 0.0
    result = command(copied, "--from", 1)
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (
        1,
        "weights retrained from checkpoints/000001: not those of the run",
    )


def test_a_program_reads_by_how_much_weights_differ(copied: Path) -> None:
    sql(copied / "replay.sqlite", "update draws set advantage = 0.0 where iteration = 3")
    result = command(copied, "--from", 2, "--json")
    answer = json.loads(result.stdout)
    (compared,) = answer["compared"]
    assert (result.exit_code, answer["equal"], answer["checkpoint"]) == (1, False, "checkpoints/000002")
    assert 0 < compared["differing"] <= compared["tensors"] and compared["largest"] > 0.0


def test_changed_weights_are_counted(copied: Path) -> None:
    """The run's own, of one iteration: those after it are made without them."""
    model = copied / "checkpoints" / "000002" / "model" / "model.safetensors"
    shutil.copy2(copied / "checkpoints" / "000001" / "model" / "model.safetensors", model)
    assert differing(again(copied)) == [(1, False), (2, True), (3, False)]


def test_a_row_whose_tokens_are_gone_is_named(copied: Path) -> None:
    query = "select trajectory from draws where iteration = 3 and stream = 'replay' order by slot limit 1"
    ((id,),) = rows(copied / "replay.sqlite", query)
    pruned = CliRunner().invoke(app, ["replay", "prune", str(copied), "--where", f"id == '{id}'", "--yes"])
    assert pruned.exit_code == 0, pruned.output
    used = rows(copied / "replay.sqlite", f"select iteration from draws where trajectory = '{id}' order by 1")
    named = rf"got none of {id} \(pruned by where\) in iteration {', '.join(str(number) for (number,) in used)}\. "
    with pytest.raises(UserError, match=named + "Retrain from a checkpoint of iteration 3 or later"):
        again(copied)


def test_rows_that_were_redacted_when_they_were_stored_are_named(tmp_path: Path, qwen2: Path) -> None:
    redactor = "from dataclasses import replace\n\ndef hide(messages):\n"
    (tmp_path / "hide.py").write_text(redactor + "    return [replace(each, content='') for each in messages]\n")
    config = settings(tmp_path, qwen2, replay={"fraction": 0.0, "redact": f"{tmp_path}/hide.py:hide"})
    run = train(config, display=SilentDisplay()).folder
    with pytest.raises(UserError, match=r"got none of \w+ \(redacted\) in iteration 1; .* and 45 more"):
        again(run)


def test_an_importance_weight_that_is_not_stored_is_refused(copied: Path) -> None:
    sql(copied / "replay.sqlite", "update draws set weight = null where iteration = 2 and slot = 3")
    with pytest.raises(UserError, match="importance weights of iteration 2 must be stored, got none of slot 3"):
        again(copied)
    assert differing(again(copied, start=2)) == [(3, False)]


def test_what_cant_be_compared_is_refused_before_anything_is_computed(copied: Path) -> None:
    checkpoints = copied / "checkpoints"
    (checkpoints / "000001" / "COMPLETE").unlink()
    with pytest.raises(UserError, match=r"--from must be an iteration with a complete checkpoint .*\(0, 2, 3\), got 1"):
        again(copied, start=1)
    with pytest.raises(UserError, match=r"--to must be an iteration after 0 whose weights .* \(2, 3\), got 1"):
        again(copied, end=1)
    with pytest.raises(UserError, match="--from must be before an iteration whose weights are there .*, got 3"):
        again(copied, start=3)
    sql(copied / "replay.sqlite", "delete from draws where iteration = 1 and slot = 3")
    with pytest.raises(UserError, match="draws of iteration 1 must be all there, got 15 of 16"):
        again(copied)
    state = checkpoints / "000002" / "state"
    (state / "state.safetensors").rename(state / "part.safetensors")
    (state / "parts.json").write_text('["part.safetensors"]')
    with pytest.raises(UserError, match="RUN must have been trained on one rank to be retrained, got a checkpoint of"):
        again(copied, start=2)
    sql(copied / "replay.sqlite", "delete from iterations where iteration = 3")
    with pytest.raises(UserError, match="--from must be before an iteration whose weights are there"):
        again(copied, start=2)


def test_a_database_without_its_folder_is_refused(finished: Path, tmp_path: Path) -> None:
    result = command(shutil.copy2(finished / "replay.sqlite", tmp_path), "--from", 0)
    assert "RUN must be a run folder with a run.json" in str(result.exception)
    result = command("postgresql://nobody@127.0.0.1:1/nothing", "--from", 0)
    assert result.exit_code == 2
