"""A learner leads its run as long as it says so; replaced, it changes nothing any more: no row and no file."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agentloop.config import ModelSection
from agentloop.engines.local.local_generator import LocalGenerator
from agentloop.models.loading import load_model
from agentloop.models.policy_weights import PolicyWeights
from agentloop.runs.leadership import Leadership
from agentloop.runs.run_folder import RunFolder
from agentloop.runs.signals import graceful_stop
from agentloop.training.policies.publisher import Publisher
from agentloop.training.train import train
from replay.errors import ReplayError, RunReplaced
from replay.store import ReplayStore
from tests.fakes.records import RUN, new_store, sql
from tests.fakes.runs import SilentDisplay, rows, small_config

pytestmark = pytest.mark.slow


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ReplayStore]:
    with closing(new_store(tmp_path / "replay.sqlite")) as store:
        yield store


def test_a_refused_learner_does_not_call_workers_of_an_ended_run_back(store: ReplayStore) -> None:
    leadership = Leadership(store, RUN, "here", lease_s=600)
    store.roles.lead(RUN, "elsewhere", lease_s=600)
    store.roles.end_run(RUN)
    with pytest.raises(ReplayError, match="while 'elsewhere' leads"), leadership.held():
        pass
    assert store.roles.view(RUN, lease_s=60.0).has_ended
    store.roles.stop_leading(RUN, "elsewhere")
    with leadership.held():
        assert not store.roles.view(RUN, lease_s=60.0).has_ended


def test_an_idle_learner_says_why_it_ends_when_another_leads(store: ReplayStore) -> None:
    """The signal that wakes it would end it without a word of that, and with another exit code."""
    leadership = Leadership(store, RUN, "here", lease_s=0.3)
    replaced = pytest.raises(RunReplaced, match="got 'elsewhere' in the place of")
    with graceful_stop(lambda text: None), replaced, leadership.held():
        sql(store, "update runs set leader = 'elsewhere'")
        time.sleep(60)


def test_trainer_whose_run_was_taken_over_publishes_nothing(tmp_path: Path, qwen2: Path) -> None:
    loaded = load_model(ModelSection(path=str(qwen2)), qwen2)
    generator = LocalGenerator(loaded.model, stop_ids=loaded.stop_ids)
    store = new_store(tmp_path / "replay.sqlite")
    folder = RunFolder(tmp_path, RUN, small_config(tmp_path, qwen2, checkpoint={"keep_policies": 1}))
    publisher = Publisher(loaded, generator, store, folder=folder, weights=PolicyWeights(loaded.model))
    publisher.publish(1)
    ReplayStore.open(tmp_path / "replay.sqlite").resume(RUN, 0)
    with pytest.raises(RunReplaced, match=r"^run must be written by one process at a time, got epoch 1 .* epoch 0"):
        publisher.publish(2)
    assert [path.name for path in (tmp_path / "policies").iterdir()] == ["000001"]
    assert generator.policy_version == 1


def test_trainer_whose_run_was_taken_over_saves_no_checkpoint(tmp_path: Path, qwen2: Path) -> None:
    folder = tmp_path / "small-001"
    config = small_config(tmp_path, qwen2, batch={"trajectories": 8}, evaluation={"tasks": 2})

    def taken_over(number: int) -> None:
        if number == 2:
            with closing(ReplayStore.open(folder / "replay.sqlite")) as store:
                store.resume(store.run().id, 1)

    with pytest.raises(
        RunReplaced, match=r"got epoch 2 where this process began epoch 1: .* Let the other process continue"
    ):
        train(config, display=SilentDisplay(at_iteration=taken_over))
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["000000", "000001"]
    assert rows(folder / "replay.sqlite", "select max(iteration) from iterations") == [(1,)]
