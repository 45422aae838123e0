from pathlib import Path

import pytest

from agentloop.config import RunConfig
from agentloop.training.train import TrainResult, train
from tests.fakes.runs import SilentDisplay, small_config
from tests.fakes.shell import Shell

Finished = tuple[TrainResult, RunConfig, SilentDisplay]


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Shell:
    return Shell(monkeypatch, capfd)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, qwen2: Path) -> Finished:
    """A run of three iterations that tests look at from all sides; it is only read."""
    config, display = small_config(tmp_path_factory.mktemp("finished"), qwen2), SilentDisplay()
    return train(config, display=display), config, display
