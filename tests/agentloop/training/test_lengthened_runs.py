"""A run goes on beyond its end, from its folder alone; what it had done keeps its meaning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentloop.config import RunConfig
from agentloop.errors import UserError
from agentloop.runs.run_folder import config_to_resume, open_run_folder
from agentloop.training.train import TrainResult, train
from tests.fakes.runs import SilentDisplay, rows, small_config

pytestmark = pytest.mark.slow

REPLAY = {"fraction": 0.5, "schedule": {"shape": "linear", "final": 0.25}, "sampler": "uniform"}


def config(folder: Path, model: Path, **run: object) -> RunConfig:
    return small_config(
        folder,
        model,
        run=run,
        rollout={"max_turns": 1},
        replay={**REPLAY, "successful_only": False},
        evaluation={"every": 0, "tasks": 2},
    )


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory, qwen2: Path) -> TrainResult:
    return train(config(tmp_path_factory.mktemp("short"), qwen2, iterations=2), display=SilentDisplay())


@pytest.fixture
def run(short: TrainResult, tmp_path: Path) -> Path:
    """The run's folder, which a test may go on with."""
    return Path(shutil.copytree(short.folder, tmp_path / "small-001", symlinks=True))


def lengthened(run: Path, *overrides: str, display: SilentDisplay | None = None) -> TrainResult:
    return train(config_to_resume(run, overrides), resume=True, run=run, display=display or SilentDisplay())


def weights(run: Path, version: int) -> dict[str, torch.Tensor]:
    return load_file(run / "policies" / f"{version:06d}" / "model.safetensors")


def test_lengthened_run_is_the_one_that_was_as_long_from_the_start(run: Path, tmp_path: Path, qwen2: Path) -> None:
    display = SilentDisplay()
    result = lengthened(run, "run.iterations=4", display=display)
    assert (result.folder, result.iterations, result.exit_code) == (run, 4, 0)
    assert "run.iterations is 4 now, after 2; schedules stay laid over 2 iterations" in display.notes
    whole = train(config(tmp_path / "whole", qwen2, iterations=4, schedule_iterations=2), display=SilentDisplay())
    for version in range(5):
        ours, theirs = weights(run, version), weights(whole.folder, version)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    # Linear from 0.5 at the first iteration to 0.25 at the second, and so it stays.
    query = "select fraction from iterations order by iteration"
    assert rows(run / "replay.sqlite", query) == [(0.5,), (0.25,), (0.25,), (0.25,)]
    # Cosine from 1.5e-3 at the first to a tenth of it.
    query = "select value from metrics where name = 'actor/learning_rate' order by iteration"
    rates = [rate for (rate,) in rows(run / "replay.sqlite", query)]
    assert rates == pytest.approx([1.5e-3, 1.5e-4, 1.5e-4, 1.5e-4])
    stored = json.loads((run / "run.json").read_text())["config"]
    assert (stored["run"]["iterations"], stored["run"]["schedule_iterations"]) == (4, 2)
    ((described,),) = rows(run / "replay.sqlite", "select config from runs")
    assert json.loads(described) == stored


def test_resumed_run_that_has_ended_says_how_it_goes_on(run: Path) -> None:
    display = SilentDisplay()
    assert lengthened(run, display=display).iterations == 2
    assert f"{run} has nothing left to do: it has made its 2 iterations. For more: --set run.iterations=NUMBER" in (
        display.notes
    )


def test_run_that_reached_its_target_goes_on_without_it(tmp_path: Path, qwen2: Path) -> None:
    settings = config(tmp_path, qwen2, iterations=3, stop_at_success=0.0).model_copy(
        update={"evaluation": small_config(tmp_path, qwen2).evaluation.model_copy(update={"every": 1, "tasks": 1})}
    )
    ended, display = train(settings, display=SilentDisplay()), SilentDisplay()
    assert ended.iterations == 1
    assert lengthened(ended.folder, display=display).iterations == 1
    (said,) = [note for note in display.notes if "nothing left to do" in note]
    assert said.endswith("To go on all the same: --set run.stop_at_success=null")
    assert lengthened(ended.folder, "run.stop_at_success=null").iterations == 3


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("run.iterations=1", "run.iterations must be at least the 2 iterations that .* has made, got 1"),
        ("run.schedule_iterations=9", "run.schedule_iterations must be the run's own when resuming .*, got 9"),
        ("replay.fraction=0.25", r"replay\.fraction must be the run's own when resuming .*-001 \(0\.5\), got 0\.25"),
        ("algorithm=ppo", r"algorithm must be the run's own when resuming .*small-001 \('grpo'\), got 'ppo'"),
        ("run.seed=1", r"run.seed must be the run's own when resuming .*small-001 \(0\), got 1"),
    ],
)
def test_what_would_change_earlier_iterations_is_refused(run: Path, override: str, problem: str) -> None:
    before = (run / "run.json").read_bytes()
    with pytest.raises(UserError, match=problem):
        lengthened(run, override)
    assert (run / "run.json").read_bytes() == before


def test_model_is_the_newest_checkpoints(run: Path, short: TrainResult) -> None:
    assert short.model == short.folder / "model"
    assert short.model.resolve() == short.folder.resolve() / "checkpoints" / "000002" / "model"
    model = AutoModelForCausalLM.from_pretrained(short.model)
    stored = weights(short.folder, 2)
    assert all(torch.equal(tensor, stored[name]) for name, tensor in model.state_dict().items() if name in stored)
    # What the run began with is apart.
    assert {path.name for path in (short.folder / "start").iterdir()} >= {"tokenizer.json", "COMPLETE"}


def test_a_run_that_was_copied_without_links_has_them_again_after_a_resume(run: Path) -> None:
    (run / "model").unlink()
    shutil.copytree(run / "checkpoints" / "000002" / "model", run / "model")
    assert (open_run_folder(run).start / "tokenizer.json").is_file()
    lengthened(run)
    assert (run / "model").is_symlink()
    assert (run / "start" / "COMPLETE").is_file()
