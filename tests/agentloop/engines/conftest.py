"""A learner, and the test server started with its version 0, which is in the folder `000000`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentloop.engines.publish.engine_control import EngineControl
from agentloop.models.loading import LoadedModel
from tests.fakes.engine_server import EngineServer, serving
from tests.fakes.published_policies import published, tiny_learner


@pytest.fixture
def learner(tmp_path: Path) -> LoadedModel:
    learner = tiny_learner(tmp_path / "model")
    published(tmp_path / "000000", learner)
    return learner


@pytest.fixture
def server(tmp_path: Path, learner: LoadedModel) -> Iterator[EngineServer]:
    with serving(tmp_path / "000000") as server:
        yield server


@pytest.fixture
def engine(server: EngineServer) -> Iterator[EngineControl]:
    with EngineControl(server.address, model="tiny") as engine:
        yield engine
