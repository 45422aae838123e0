"""The policy with the best held-out success stays, whatever becomes of the run, and the run says why it ended."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from agentloop.analysis.exported_model import export_run
from agentloop.analysis.stored_policies import Asked, evaluate_run, named_weights
from agentloop.config import RunConfig
from agentloop.config.sections.run_section import RunSection
from agentloop.runs.run_folder import config_to_resume, open_run_folder
from agentloop.training.loop_state import LoopState
from agentloop.training.train import TrainResult, train
from replay.errors import ReplayError
from tests.fakes.processes import assert_same_bits
from tests.fakes.runs import SilentDisplay, StopAfter, rows, small_config

Unbroken = tuple[TrainResult, SilentDisplay]
EVALUATED = "select iteration, value from metrics where name = 'eval/success' order by iteration"


@pytest.mark.parametrize(
    ("evaluations", "best", "without_better"),
    [
        ([(0.25, 8), (0.5, 8), (0.375, 8)], 1, 1),
        ([(0.5, 8), (0.5, 8), (0.25, 8)], 1, 2),  # the newer of two equals, which is not better
        # The interval of 4 of 4 tasks is 0.51 to 1, that of 30 of 32 is 0.80 to 0.98.
        ([(30 / 32, 32), (1.0, 4)], 0, 1),
    ],
)
def test_best_policy_has_the_highest_middle_of_its_interval(
    evaluations: list[tuple[float, int]], best: int, without_better: int
) -> None:
    state = LoopState()
    for state.iteration, (success, tasks) in enumerate(evaluations):
        state.add_evaluation(success, tasks)
    assert state.best is not None and (state.best.iteration, state.without_better) == (best, without_better)
    assert state.end(RunSection(patience=without_better + 1)) is None
    why = f"{without_better} evaluations in a row were not better than the best (run.patience)"
    assert state.end(RunSection(patience=without_better)) == (why, "run.patience=null")
    assert LoopState.from_values(json.loads(json.dumps(asdict(state)))) == state


def kill(iteration: int) -> None:
    """End the process, as far as the run can tell, in the middle of an iteration."""
    if iteration == 4:
        raise MemoryError("killed")


def settings(folder: Path, model: Path, **sections: dict[str, Any]) -> RunConfig:
    evaluated = {"evaluation": {"every": 1, "tasks": 16}, "optimizer": {"learning_rate": 0.02}}
    kept = {"run": {"iterations": 5}, "checkpoint": {"every": 3, "keep": 1}}
    return small_config(folder, model, **{**evaluated, **kept, **sections})


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, qwen2: Path) -> Unbroken:
    display = SilentDisplay()
    return train(settings(tmp_path_factory.mktemp("runs"), qwen2), display=display), display


@pytest.mark.slow
def test_best_policy_stays_with_its_figures_and_the_run_ends_with_them(unbroken: Unbroken) -> None:
    result, display = unbroken
    run, evaluated = result.folder, dict(rows(result.folder / "replay.sqlite", EVALUATED))
    best = max(evaluated, key=lambda iteration: (evaluated[iteration], iteration))
    (kept,) = (run / "best").iterdir()
    assert (kept.name, result.best, result.why_ended) == (f"{best:06d}", best, "all iterations are made")
    facts = json.loads((kept / "held_out.json").read_text())
    assert (facts["iteration"], facts["success"], facts["tasks"]) == (best, evaluated[best], 16)
    assert_same_bits(kept / "model.safetensors", run / "policies" / kept.name / "model.safetensors")
    figure = f"{100 * facts['success']:.1f} % ({100 * facts['low']:.0f}-{100 * facts['high']:.0f})"
    assert display.notes[-3:] == [
        f"best policy: iteration {best}, held-out success {figure}, {kept}. To export it: agentloop export "
        f"{run}:best --to FOLDER",
        f"to go on: agentloop train {run} --resume --set run.iterations=NUMBER",
        "ended after iteration 5 of 5: all iterations are made",
    ]


@pytest.mark.slow
def test_killed_run_ends_with_the_best_policy_of_the_unbroken(unbroken: Unbroken, tmp_path: Path, qwen2: Path) -> None:
    """The newest checkpoint is that of iteration 3. The policy of iteration 4 is better, and the run is killed then."""
    run, display = tmp_path / "small-001", SilentDisplay(at_iteration=kill)
    with pytest.raises(MemoryError):
        train(settings(tmp_path, qwen2), display=display)
    assert "ended after iteration 4 of 5: the error below" in display.notes
    assert sorted(path.name for path in (run / "best").iterdir()) == ["000003", "000004"]
    back = train(config_to_resume(run, ["run.iterations=3"]), resume=True, run=run, display=SilentDisplay())
    assert ([path.name for path in (run / "best").iterdir()], back.best) == (["000003"], 3)
    train(config_to_resume(run, ["run.iterations=5"]), resume=True, run=run, display=SilentDisplay())
    (ours,), (theirs,) = ((folder / "best").iterdir() for folder in (run, unbroken[0].folder))
    assert (ours / "held_out.json").read_text() == (theirs / "held_out.json").read_text()
    assert_same_bits(ours / "model.safetensors", theirs / "model.safetensors")


@pytest.mark.slow
def test_best_policy_is_named_wherever_a_policy_is(unbroken: Unbroken, tmp_path: Path) -> None:
    run = unbroken[0].folder
    (kept,), evaluated = (run / "best").iterdir(), dict(rows(run / "replay.sqlite", EVALUATED))
    for found in (evaluate_run(Path(f"{run}:best")), evaluate_run(run, Asked(), policy="best")):
        assert (found.evaluated.checkpoint, found.evaluation.success) == (str(kept), evaluated[int(kept.name)])
    assert named_weights(open_run_folder(run), "best") == (int(kept.name), kept)
    assert RunConfig.model_validate({"model": {"path": f"{run}:best"}}).model.path == str(kept)
    with pytest.raises(ReplayError, match=f"RUN:best must be a run with a best policy, got none in {tmp_path}"):
        RunConfig.model_validate({"model": {"path": f"{tmp_path}:best"}})
    card = (export_run(Path(f"{run}:best"), tmp_path / "best") / "README.md").read_text()
    assert f"| held-out success | {100 * evaluated[int(kept.name)]:.1f} % (" in card
    assert f"| iterations | {int(kept.name)} |" in card


@pytest.mark.slow
def test_run_without_a_better_policy_ends_and_goes_on_with_more_patience(tmp_path: Path, qwen2: Path) -> None:
    """With a learning rate of 0 all evaluations are equal."""
    config = settings(tmp_path, qwen2, run={"iterations": 4, "patience": 2}, optimizer={"learning_rate": 1e-30})
    assert train(config, display=StopAfter(1)).why_ended == "interrupted by SIGTERM"
    display = SilentDisplay()
    ended = train(config, resume=True, display=display)
    assert (ended.iterations, ended.best) == (2, 2)
    assert f"to go on: agentloop train {ended.folder} --resume --set run.patience=null" in display.notes
    longer = config_to_resume(ended.folder, ["run.patience=3"])
    assert train(longer, resume=True, run=ended.folder, display=SilentDisplay()).iterations == 3
