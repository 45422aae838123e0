"""A run is begun, continued and lengthened, from its folder alone, by one process at a time."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentloop.config import RunConfig
from agentloop.errors import UserError
from agentloop.runs.run_folder import config_to_resume, record_config, resumed_run_folder
from agentloop.training.train import TrainResult, train
from tests.fakes.processes import assert_same_bits
from tests.fakes.runs import SilentDisplay, StopAfter, rows, small_config

pytestmark = pytest.mark.slow

REPLAY = {"fraction": 0.5, "schedule": {"shape": "linear", "final": 0.25}, "sampler": "uniform"}


def scheduled(folder: Path, model: Path, **run: object) -> RunConfig:
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
    return train(scheduled(tmp_path_factory.mktemp("short"), qwen2, iterations=2), display=SilentDisplay())


@pytest.fixture
def run(short: TrainResult, tmp_path: Path) -> Path:
    """The run's folder, which a test may go on with."""
    return Path(shutil.copytree(short.folder, tmp_path / "small-001", symlinks=True))


def lengthened(run: Path, *overrides: str, display: SilentDisplay | None = None) -> TrainResult:
    return train(config_to_resume(run, overrides), resume=True, run=run, display=display or SilentDisplay())


def weights(run: Path, version: int) -> dict[str, torch.Tensor]:
    return load_file(run / "policies" / f"{version:06d}" / "model.safetensors")


def test_lengthened_run_is_the_one_that_was_as_long_from_the_start(run: Path, tmp_path: Path, qwen2: Path) -> None:
    """One that has ended says first how it goes on."""
    display = SilentDisplay()
    assert lengthened(run, display=display).iterations == 2
    assert "ended after iteration 2 of 2: all iterations are made" in display.notes
    assert f"to go on: agentloop train {run} --resume --set run.iterations=NUMBER" in display.notes
    result = lengthened(run, "run.iterations=4", display=display)
    assert (result.folder, result.iterations, result.exit_code) == (run, 4, 0)
    assert f"resumed {run} after iteration 2" in display.notes
    assert "run.iterations is 4 now, after 2; schedules stay laid over 2 iterations" in display.notes
    whole = train(scheduled(tmp_path / "whole", qwen2, iterations=4, schedule_iterations=2), display=SilentDisplay())
    for made in range(5):
        assert_same_bits(*(folder / "policies" / f"{made:06d}" / "model.safetensors" for folder in (run, whole.folder)))
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


def test_resumed_run_says_what_was_undone(run: Path) -> None:
    shutil.rmtree(run / "checkpoints/000002")
    display = SilentDisplay()
    lengthened(run, display=display)
    resumed = f"resumed {run} after iteration 1; undone of what came after it: "
    (said,) = [note for note in display.notes if note.startswith(resumed)]
    assert re.fullmatch(r"\d+ draws rolled back, \d+ trajectories orphaned", said.removeprefix(resumed))


def test_run_that_reached_its_target_goes_on_without_it(tmp_path: Path, qwen2: Path) -> None:
    run, evaluation = {"iterations": 3, "stop_at_success": 0.0}, {"every": 1, "tasks": 1}
    settings = small_config(tmp_path, qwen2, run=run, evaluation=evaluation)
    ended, display = train(settings, display=SilentDisplay()), SilentDisplay()
    assert ended.iterations == 1
    assert lengthened(ended.folder, display=display).iterations == 1
    why = "held-out success reached run.stop_at_success=0.0 in two evaluations in a row"
    assert (ended.why_ended, f"ended after iteration 1 of 3: {why}" in display.notes) == (why, True)
    assert f"to go on: agentloop train {ended.folder} --resume --set run.stop_at_success=null" in display.notes
    assert lengthened(ended.folder, "run.stop_at_success=null").iterations == 3


def test_resumed_run_takes_another_speed_and_says_so(run: Path) -> None:
    display = SilentDisplay()
    asked = ("batch.micro_batch_tokens=300", "compute.autocast=bfloat16", "evaluation.every=1", "checkpoint.every=2")
    assert lengthened(run, "run.iterations=3", *asked, display=display).iterations == 3
    assert [note for note in display.notes if " now, after " in note] == [
        "run.iterations is 3 now, after 2; batch.micro_batch_tokens is 300 now, after 1536; compute.autocast is "
        "bfloat16 now, after auto; evaluation.every is 1 now, after 0; checkpoint.every is 2 now, after 1; schedules "
        "stay laid over 2 iterations; from here on weights differ by rounding from those of an unbroken run"
    ]
    went_on = config_to_resume(run, ())
    assert (went_on.compute.autocast, went_on.checkpoint.every) == ("bfloat16", 2)
    folder = resumed_run_folder(config_to_resume(run, ["run.threads=3", "checkpoint.every=1"]), run)
    assert str(record_config(folder)).startswith("run.threads is 3 now, after 1; checkpoint.every is 1 now, after 2; ")
    assert record_config(folder) is None


def test_resumed_run_multiplies_in_the_type_that_auto_was_when_it_began(run: Path) -> None:
    """As one that has begun on a GPU goes on without one."""
    begun = json.loads((run / "run.json").read_text())
    assert begun["chosen"] == {"device": "cpu", "autocast": "none"}
    begun["chosen"] = {"device": "cuda", "autocast": "bfloat16"}
    (run / "run.json").write_text(json.dumps(begun))
    display = SilentDisplay()
    lengthened(run, "run.iterations=3", "model.device=cpu", display=display)
    (said,) = [note for note in display.notes if note.startswith("computing on cpu: ")]
    assert "weights in float32, products in bfloat16" in said
    assert said.endswith(". The run began on cuda: from here on it differs from an unbroken run")
    now = json.loads((run / "run.json").read_text())
    assert (now["chosen"], now["config"]["compute"]["autocast"]) == ({"device": "cpu", "autocast": "bfloat16"}, "auto")
    lengthened(run, "run.iterations=4", "compute.autocast=none")
    assert json.loads((run / "run.json").read_text())["chosen"]["autocast"] == "none"


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


def test_model_is_the_newest_checkpoints_also_after_a_copy_without_links(run: Path, short: TrainResult) -> None:
    assert short.model == short.folder / "model"
    assert short.model.resolve() == short.folder.resolve() / "checkpoints" / "000002" / "model"
    model, stored = AutoModelForCausalLM.from_pretrained(short.model), weights(short.folder, 2)
    assert all(torch.equal(tensor, stored[name]) for name, tensor in model.state_dict().items() if name in stored)
    (run / "model").unlink()
    shutil.copytree(run / "checkpoints" / "000002" / "model", run / "model")
    lengthened(run)
    assert (run / "model").is_symlink()
    # What the run began with is apart.
    assert {path.name for path in (run / "start").iterdir()} >= {"tokenizer.json", "COMPLETE"}


def two_iterations(folder: Path, model: Path, **run: object) -> RunConfig:
    brief = {"rollout": {"max_turns": 1}, "evaluation": {"every": 0, "tasks": 1}}
    return small_config(folder, model, run={"iterations": 2, **run}, **brief)


def test_auto_begins_a_run_then_continues_it_and_leaves_it_alone_once_it_has_ended(tmp_path: Path, qwen2: Path) -> None:
    config = two_iterations(tmp_path, qwen2)
    stopped = train(config, resume="auto", display=StopAfter(1))
    assert (stopped.folder, stopped.iterations, stopped.exit_code) == (tmp_path / "small-001", 1, 143)
    assert train(config, resume="auto", display=SilentDisplay()).iterations == 2
    report, display = stopped.report.read_bytes(), SilentDisplay()
    ended = train(config, resume="auto", display=display)
    assert display.notes == [f"{tmp_path / 'small-001'} has ended after iteration 2: nothing is left"]
    assert (ended.folder, ended.iterations, ended.exit_code) == (tmp_path / "small-001", 2, 0)
    assert stopped.report.read_bytes() == report
    assert [path.name for path in tmp_path.glob("small-*")] == ["small-001"]


def test_a_run_is_begun_and_continued_in_the_folder_it_is_given(tmp_path: Path, qwen2: Path) -> None:
    config, folder = two_iterations(tmp_path, qwen2), tmp_path / "small-007"
    (folder / "logs").mkdir(parents=True)  # where a launch has begun to write
    assert train(config, run=folder, display=StopAfter(1)).iterations == 1
    train(two_iterations(tmp_path, qwen2, iterations=1), display=SilentDisplay())  # small-008, the newest now
    assert train(config, run=folder, display=SilentDisplay()).folder == folder
    with pytest.raises(UserError, match=r"run.seed must be the run's own when resuming .*small-007"):
        train(two_iterations(tmp_path, qwen2, seed=3), run=folder, display=SilentDisplay())


def test_a_run_that_can_not_be_put_together_leaves_only_the_logs_of_its_folder(tmp_path: Path, qwen2: Path) -> None:
    config, folder = two_iterations(tmp_path, tmp_path / "nowhere"), tmp_path / "small-001"
    (folder / "logs").mkdir(parents=True)
    with pytest.raises(UserError, match="nowhere"):
        train(config, run=folder, display=SilentDisplay())
    assert [path.name for path in folder.iterdir()] == ["logs"]
    assert train(two_iterations(tmp_path, qwen2), run=folder, display=SilentDisplay()).iterations == 2
