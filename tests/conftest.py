"""Property tests try the same examples each time in `make test`; `make soak` tries new ones."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.fakes.engine_server import EngineServer

TESTS = Path(__file__).parent

pytest_plugins = ["tests.fakes.databases"]

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("random", print_blob=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# The test modules import over a million objects together. What collection has made is never garbage: not looking for
# it again and again saves more time than many a test takes.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model to start runs from; it is only read."""
    from tests.fakes.runs import save_qwen2

    return save_qwen2(tmp_path_factory.mktemp("models") / "qwen2")


@pytest.fixture(scope="module")
def server(qwen2: Path) -> "Iterator[EngineServer]":
    """An engine with that model."""
    from tests.fakes.engine_server import serving

    with serving(qwen2) as server:
        yield server


LONGEST = (
    "replay/storage/test_kill_points.py",
    "agentloop/distributed/test_ranks.py",
    "agentloop/training/test_loop.py",
    "agentloop/training/test_faults.py",
    "agentloop/cli/test_main.py",
    "replay/storage/test_races.py",
    "replay/storage/test_conformance.py",
    "invariants/test_objectives.py",
    "docs/test_blocks.py",
    "replay/sampling/test_draws.py",
)
"""They come first, for a core has nothing to do while the other is in the middle of one at the end.

Faults, which must be told within seconds, come when the checks beside the tests have ended.
"""


SLOW = ("benchmarks/", "browser/", "docs/test_blocks.py", "docs/test_notebook.py", "docs/test_minimal_loop.py")
"""What is slow as a whole, from this folder."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(TESTS).as_posix().startswith(SLOW):
            item.add_marker(pytest.mark.slow)
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.relative_to(TESTS).as_posix(), len(places)))
