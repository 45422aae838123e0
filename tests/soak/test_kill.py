"""kill -9 of a trainer at any moment, and --resume: the run ends as if nothing had happened."""

import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.processes import Moments, Training, assert_same_run, assert_sound, write_config
from tests.fakes.runs import PARITY, ROOT, rows, save_qwen2, small_config

pytestmark = pytest.mark.soak

KILLS = 30
ITERATIONS = 24
EVERY = 4
GAME = f"{ROOT / 'examples' / 'number_game.py'}:NumberGame"
Unbroken = tuple[Path, Path, float]
"""A run's folder, its model, and its seconds from the first line to the last."""


@pytest.fixture(scope="module", params=[PARITY, GAME], ids=["parity", "game"])
def environment(request: pytest.FixtureRequest) -> str:
    """One that answers calls alone, and one that answers replies, rewards steps and ends episodes."""
    return str(request.param)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, environment: str) -> Unbroken:
    """A run that was left in peace."""
    folder = tmp_path_factory.mktemp("unbroken")
    model = save_qwen2(folder / "model")
    training = Training(small_file(folder, model, environment))
    ready = training.says("run folder:")
    assert training.wait() == 0, training.errors
    return folder / "runs" / "small-001", model, training.says("held-out success") - ready


def small_file(at: Path, model: Path, environment: str) -> Path:
    sections = {"run": {"iterations": ITERATIONS}, "environment": {"name": environment}, "checkpoint": {"every": EVERY}}
    return write_config(small_config(at / "runs", model, **sections), at / "small.yaml")


def check_after_kill(moments: Moments, orphans: int) -> int:
    """At most one interval is lost, no orphan is lost; how many orphans there are."""
    assert moments.committed - moments.saved <= EVERY
    now = moments.number("select count(*) from trajectories where state = 'orphaned'")
    assert now >= orphans
    return now


def test_runs_killed_at_random_end_like_the_unbroken_one(unbroken: Unbroken, environment: str, tmp_path: Path) -> None:
    rng = random.Random(KILLS)
    whole, model, seconds = unbroken
    kills = runs = 0
    while kills < KILLS:
        runs += 1
        own = tmp_path / str(runs)
        own.mkdir()
        config, pause = small_file(own, model, environment), lambda: rng.uniform(0, seconds / 3)
        kills += kill_until_finished(config, at_most=KILLS - kills, pause=pause)
        assert_sound(own / "runs" / "small-001", iterations=ITERATIONS)
        assert_same_run(own / "runs" / "small-001", whole)
    print(f"{kills} kills in {runs} runs")


def kill_until_finished(config: Path, *, at_most: int, pause: Callable[[], float]) -> int:
    """Start one run again and again until it ends by itself; how often it was killed."""
    moments = Moments(config.parent / "runs" / "small-001", every=EVERY)
    kills = orphans = 0
    while True:
        training = Training(config, *(["--resume"] if kills else []))
        if kills < at_most:
            training.wait_until(training.says("resumed" if moments.saved else "run folder:") + pause())
            training.kill()
        if training.wait() == 0:
            check_after_kill(moments, orphans)
            return kills
        assert training.wait() == -signal.SIGKILL, training.errors
        kills += 1
        orphans = check_after_kill(moments, orphans)


def test_run_killed_at_every_tender_moment_ends_alike(unbroken: Unbroken, environment: str, tmp_path: Path) -> None:
    whole, model, _ = unbroken
    config = small_file(tmp_path, model, environment)
    moments = Moments(tmp_path / "runs" / "small-001", every=EVERY)
    first = Training(config)
    first.says("evaluate ...")
    first.kill()
    assert not list(moments.folder.glob("checkpoints/*/COMPLETE"))
    orphans = 0
    for moment in [moments.appending, moments.committed_unpublished, moments.published_unsaved, moments.saving] * 2:
        training = Training(config, "--resume")
        training.says("iteration")
        assert training.kill_when(moment), moment.__name__
        orphans = check_after_kill(moments, orphans)
    assert orphans > 0
    last = Training(config, "--resume")
    assert last.wait() == 0, last.errors
    assert_sound(moments.folder, iterations=ITERATIONS)
    assert_same_run(moments.folder, whole)


def test_quickstart_killed_three_times_and_stopped_twice_ends_like_the_unbroken_one(tmp_path: Path) -> None:
    sets = ["--set", "run.iterations=6", "--set", "checkpoint.every=2"]
    quickstart = ROOT / "configs" / "quickstart.yaml"
    whole = Training(quickstart, *sets, "--set", f"run.folder={tmp_path / 'whole'}")
    assert whole.wait() == 0, whole.errors
    sets += ["--set", f"run.folder={tmp_path / 'broken'}"]
    ours, theirs = (tmp_path / name / "quickstart-001" for name in ("broken", "whole"))
    moments = Moments(ours, every=2)

    training = Training(quickstart, *sets)
    training.wait_until(training.says("warm-up ...") + 5)
    training.kill()
    assert not any("evaluate" in line for line in training.printed)
    training = Training(quickstart, *sets, "--resume")
    training.wait_until(training.says("evaluate ...") + 0.3)
    training.end_with(signal.SIGINT, code=130)
    assert moments.saved == moments.committed == 0
    for iteration in (1, 2):
        training = Training(quickstart, *sets, "--resume")
        training.wait_until(training.says(f"iteration {iteration}/6") + 0.5)
        training.kill()
        assert moments.committed - moments.saved <= 2
    # The iteration that is under way ends with an evaluation.
    training = Training(quickstart, *sets, "--resume")
    training.wait_until(training.says("iteration 3/6") + 0.3)
    training.end_with(signal.SIGTERM, code=143)
    assert moments.saved == moments.committed == 4
    last = Training(quickstart, *sets, "--resume")
    assert last.wait() == 0, last.errors

    assert_sound(ours, iterations=6)
    assert_same_run(ours, theirs)
    assert rows(ours / "replay.sqlite", "select count(*) from trajectories where state = 'orphaned'") != [(0,)]
