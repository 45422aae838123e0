from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.agent_sessions import Gateway, scripted_gateway


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with scripted_gateway() as running:
        yield running
