from collections.abc import Iterator

import pytest

from tests.fakes.agent_sessions import Gateway, ScriptedSession, scripted_gateway


@pytest.fixture(scope="session")
def _running() -> Iterator[Gateway]:
    with scripted_gateway() as running:
        yield running


@pytest.fixture
def gateway(_running: Gateway) -> Gateway:
    """A gateway with a new session."""
    _running.sessions.session = ScriptedSession()
    return _running
