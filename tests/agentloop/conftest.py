from pathlib import Path

import pytest

from agentloop.config import RunConfig
from agentloop.training.train import TrainResult, train
from tests.fakes.runs import SilentDisplay, save_qwen2, small_config

Finished = tuple[TrainResult, RunConfig, SilentDisplay]


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model to start runs from; it is only read."""
    return save_qwen2(tmp_path_factory.mktemp("models") / "qwen2")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, qwen2: Path) -> Finished:
    """A run of three iterations that tests look at from all sides; it is only read."""
    config, display = small_config(tmp_path_factory.mktemp("finished"), qwen2), SilentDisplay()
    return train(config, display=display), config, display
