from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.runs import save_qwen2


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model to start runs from; it is only read."""
    return save_qwen2(tmp_path_factory.mktemp("models") / "qwen2")
