"""A server that runs while the tests of this folder do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.mcp_servers import over_http


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    with over_http() as url:
        yield url
