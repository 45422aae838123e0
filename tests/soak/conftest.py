from pathlib import Path

import pytest

from tests.soak.test_quickstart import quickstart


@pytest.fixture(scope="session")
def warmed_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the quickstart's first iteration begins with; it is only read."""
    result = quickstart(tmp_path_factory.mktemp("warm-up"), "run.iterations=1", "evaluation.tasks=1")
    return Path(str(result["folder"])) / "start"
