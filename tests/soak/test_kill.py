"""kill -9 of a trainer at its tender moments, and --resume: the run ends as if nothing had happened."""

from pathlib import Path

import pytest

from tests.fakes.processes import Moments, Training, assert_same_run, assert_sound, write_config
from tests.fakes.runs import PARITY, save_qwen2, small_config

pytestmark = pytest.mark.soak

ITERATIONS = 24
EVERY = 4
Unbroken = tuple[Path, Path]
"""A run's folder, and its model."""


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    """A run that was left in peace."""
    folder = tmp_path_factory.mktemp("unbroken")
    model = save_qwen2(folder / "model")
    training = Training(small_file(folder, model))
    assert training.wait() == 0, training.errors
    return folder / "runs" / "small-001", model


def small_file(folder: Path, model: Path) -> Path:
    config = small_config(
        folder / "runs",
        model,
        run={"iterations": ITERATIONS},
        environment={"name": PARITY},
        checkpoint={"every": EVERY},
    )
    return write_config(config, folder / "small.yaml")


def check_after_kill(moments: Moments, orphans: int) -> int:
    """At most one interval is lost, no orphan is lost; how many orphans there are."""
    assert moments.committed - moments.saved <= EVERY
    now = moments.number("select count(*) from trajectories where state = 'orphaned'")
    assert now >= orphans
    return now


def test_run_killed_at_every_tender_moment_ends_like_the_unbroken_one(unbroken: Unbroken, tmp_path: Path) -> None:
    whole, model = unbroken
    config = small_file(tmp_path, model)
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
