"""Whole runs in seconds: what was planned, drawn, learned and written down agrees."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from agentloop.cli.main import app
from agentloop.errors import UserError
from agentloop.rollouts.evaluation import Evaluated
from agentloop.runs.display import ConsoleDisplay
from agentloop.runs.run_folder import open_run_folder
from agentloop.training.train import TrainResult, train
from replay.mixing.apportion import group_sizes
from tests.agentloop.conftest import Finished
from tests.fakes.processes import assert_same_bits, assert_same_run, assert_sound, write_config
from tests.fakes.runs import SilentDisplay, StopAfter, rows, small_config
from tests.soak.test_quickstart import worst_log_prob_error


@pytest.fixture(scope="module")
def without_replay(tmp_path_factory: pytest.TempPathFactory, qwen2: Path) -> TrainResult:
    config = small_config(tmp_path_factory.mktemp("without"), qwen2, replay={"fraction": 0.0})
    return train(config, display=SilentDisplay())


def test_run_composition_is_what_the_rule_gives(finished: Finished) -> None:
    result, _, _ = finished
    database = result.folder / "replay.sqlite"
    for iteration, (fresh, replayed) in enumerate([(16, 0), (12, 4), (12, 4)], start=1):
        counts = dict(rows(database, f"select stream, count(*) from draws where iteration = {iteration} group by 1"))
        assert counts == {name: n for name, n in (("fresh", fresh), ("replay", replayed)) if n}
        sizes = rows(database, f"select size from groups where iteration = {iteration} order by size desc")
        assert [size for (size,) in sizes] == group_sizes(fresh, 4)
    # 16, then a quarter of 16 replayed, of what was collected before
    later = "select count(*) from draws join trajectories t on t.id = trajectory where stream = 'replay' and "
    assert rows(database, f"{later} t.iteration >= draws.iteration") == [(0,)]
    assert rows(database, "select fresh, replay from iterations order by iteration") == [(16, 0), (12, 4), (12, 4)]


def test_run_that_collapses_says_so_at_once_and_at_its_end_with_what_helps(tmp_path: Path, qwen2: Path) -> None:
    evaluation, display = {"every": 1, "tasks": 40}, SilentDisplay()
    train(small_config(tmp_path, qwen2, optimizer={"learning_rate": 3.0}, evaluation=evaluation), display=display)
    collapsed = (
        "success fell from 38 % to 0 %. The learning rate is probably too high. Begin again with --set "
        "optimizer.learning_rate=0.3: docs/reading-a-run.md."
    )
    assert [said for said in display.notes if "learning rate" in said] == [collapsed, collapsed]
    assert (display.iterations[0]["eval/success"], display.iterations[0]["eval/tasks"]) == (0.0, 40.0)


def test_run_of_which_nothing_succeeds_says_so_once_before_training(tmp_path: Path, qwen2: Path) -> None:
    display, rollout = SilentDisplay(), {"success_reward": 2.0, "max_turns": 2, "max_tokens_per_turn": 12}
    train(small_config(tmp_path, qwen2, run={"iterations": 1}, rollout=rollout), display=display)
    (said,) = [note for note in display.notes if "succeeded" in note]
    assert said.startswith("none of 8 episodes succeeded: ") and said.endswith(": agentloop sft on demonstrations")
    assert display.notes.index(said) < display.notes.index("held-out success before training: 0.0 % (0-32)")


def test_run_commits_every_draw_with_its_statistics(finished: Finished) -> None:
    database = finished[0].folder / "replay.sqlite"
    assert rows(database, "select distinct state from draws") == [("committed",)]
    assert rows(database, "select count(*) from draws where drift_mean is null or ess_share is null") == [(0,)]
    shares = rows(database, "select sum(ess_share) from draws group by iteration, stream")
    assert [share for (share,) in shares] == pytest.approx([1.0] * 5)
    assert rows(database, "select min(staleness), max(staleness) from draws where stream = 'replay'") == [(1, 2)]
    drifts = rows(database, "select drift_mean, token_gap_max from draws where stream = 'fresh'")
    assert len(drifts) == 40
    assert all(abs(mean - 1) < 1e-4 and gap < 1e-4 for mean, gap in drifts)


def test_stored_log_probs_are_those_of_the_policy_that_sampled_them(finished: Finished) -> None:
    assert rows(finished[0].folder / "replay.sqlite", "select count(*) from trajectories") == [(16 + 12 + 12,)]
    assert worst_log_prob_error(finished[0].folder) < 1e-4


def test_run_metrics_in_the_database_are_those_people_saw(finished: Finished) -> None:
    result, _, display = finished
    stored: dict[int, dict[str, float]] = {}
    for iteration, name, value in rows(result.folder / "replay.sqlite", "select iteration, name, value from metrics"):
        stored.setdefault(iteration, {})[name] = value
    seen = dict(enumerate(display.iterations, start=1))
    assert {i: stored[i] for i in (1, 2, 3)} == seen
    assert display.iterations[1]["batch/achieved_fraction"] == 0.25
    assert display.iterations[0]["replay/starved_rows"] == 4


def test_observing_leaves_parameters_as_no_replay(without_replay: TrainResult, tmp_path: Path, qwen2: Path) -> None:
    display = SilentDisplay()
    observed = train(small_config(tmp_path, qwen2, replay={"fraction": 0.5, "mode": "observe"}), display=display)
    assert_same_bits(*(run.folder / "policies/000003/model.safetensors" for run in (without_replay, observed)))
    assert [row["batch/replay"] for row in display.iterations] == [0, 8, 8]
    assert all(row["batch/fresh"] == 16 for row in display.iterations)
    assert {"actor/replay/drift_mean", "actor/replay/ess"} <= display.iterations[1].keys()
    assert "actor/replay/pg_loss" not in display.iterations[1]


def test_resumed_run_with_a_critic_ends_like_the_unbroken_one(tmp_path: Path, qwen2: Path) -> None:
    sections: dict[str, Any] = {
        "kl": {"reward_coef": 0.05},
        "batch": {"ppo_epochs": 2},
        "optimizer": {"name": "muon"},
        "critic": {"optimizer": {"name": "sgd"}},
    }
    whole, stopped = (small_config(tmp_path / name, qwen2, "ppo", **sections) for name in ("a", "b"))
    display = SilentDisplay()
    unbroken = train(whole, display=display)
    first = train(stopped, display=StopAfter(1))
    second = train(stopped, resume=True, display=SilentDisplay())
    assert (first.exit_code, first.iterations) == (143, 1)
    assert (second.exit_code, second.iterations, second.folder) == (0, 3, first.folder)
    assert_same_run(second.folder, unbroken.folder)
    state = load_file(unbroken.folder / "checkpoints" / "000003" / "state" / "state.safetensors")
    for part in ("critic.weights/backbone", "q_proj.weight/muon.momentum_buffer", "q_proj.weight/sgd.momentum_buffer"):
        assert any(part in name for name in state)
    assert {"critic/vf_loss", "critic/explained_variance", "actor/reward_kl"} <= display.iterations[-1].keys()
    # What the draws say a row was trained with is what the critic made of it.
    query = "select count(*) from draws d join trajectories t on t.id = d.trajectory where d.advantage != t.advantage"
    assert rows(unbroken.folder / "replay.sqlite", query) > [(0,)]


def test_two_processes_can_not_train_in_one_folder(finished: Finished) -> None:
    result, config, _ = finished
    with open_run_folder(result.folder).lock(), pytest.raises(UserError, match="must be used by one process"):
        train(config, resume=True, display=SilentDisplay())


def test_batch_that_is_all_replay_is_shown_and_learned_from(tmp_path: Path, qwen2: Path) -> None:
    words = io.StringIO()
    config = small_config(tmp_path, qwen2, replay={"fraction": 1.0})
    result = train(config, display=ConsoleDisplay(file=words))
    assert rows(result.folder / "replay.sqlite", "select fresh, replay from iterations") == [(16, 0), (0, 16), (0, 16)]
    assert "fresh 0 + replay 16" in words.getvalue()


def test_resumed_on_a_server_as_whole_on_sqlite(tmp_path: Path, qwen2: Path, new_database: Callable[..., str]) -> None:
    whole = train(small_config(tmp_path / "whole", qwen2), display=SilentDisplay())
    config = small_config(tmp_path, qwen2, replay={"database": new_database()})
    assert train(config, display=StopAfter(1)).exit_code == 143
    ours = train(config, resume=True, display=SilentDisplay())
    assert (ours.exit_code, ours.iterations) == (0, 3)
    assert not list(ours.folder.glob("*.sqlite*"))
    assert_sound(ours.folder, iterations=3)
    assert_same_run(ours.folder, whole.folder)


def test_a_model_that_no_run_has_trained_is_evaluated_as_a_run_would_first(finished: Finished, tmp_path: Path) -> None:
    result, config, _ = finished
    file = write_config(config, tmp_path / "config.yaml")
    for model in (["--model", str(config.model.path)], []):
        words = ["evaluate", "--config", str(file), *model, "--json"]
        found = json.loads(CliRunner().invoke(app, words).stdout)
        assert found["success"] == result.success_before
    assert str(Evaluated("mine", None, "mine", "parity", "1")) == "mine, environment parity 1"
    mixed = CliRunner().invoke(app, ["evaluate", str(result.folder), "--model", "m"])
    assert "RUN must be given alone, or --config and perhaps --model" in str(mixed.exception)
