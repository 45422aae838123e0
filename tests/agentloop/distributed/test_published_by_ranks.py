"""What two ranks publish is what one rank publishes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentloop.engines.publish.published_policy import RECORD, read_published
from agentloop.models.policy_weights import PolicyWeights
from tests.agentloop.distributed import ranked_publishes
from tests.agentloop.distributed.ranked_publishes import NAMES, loaded_policy, publish
from tests.fakes.published_policies import tiny_learner
from tests.fakes.runs import ROOT, save_llama, save_qwen2

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each policy: as two ranks published it, before an update and after it."""
    folder = tmp_path_factory.mktemp("published")
    tiny_learner(folder / "tied" / "model")
    save_llama(folder / "untied" / "model")
    save_llama(folder / "half" / "model")
    save_qwen2(folder / "lora" / "model")
    command = [sys.executable, ranked_publishes.__file__, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return folder


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def log_probs_of(folder: Path) -> list[tuple[float, ...]]:
    probe = read_published(folder).probe
    return [*probe.log_probs, *probe.rounding, *probe.next_log_probs]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_publish_the_files_of_one(published: Path, tmp_path: Path, name: str) -> None:
    loaded, made = loaded_policy(published, name), published / name
    publish(tmp_path / "one", loaded, PolicyWeights(loaded.model))
    for two, one in ((made / "two", tmp_path / "one"), (made / "two-updated", made / "one-updated")):
        ours, theirs = bytes_of(two), bytes_of(one)
        assert ours.keys() == theirs.keys()
        assert [file for file in ours if ours[file] != theirs[file] and file != RECORD] == []
        # A sharded pass multiplies the same whole weights, which may lie otherwise in memory.
        for found, wanted in zip(log_probs_of(two), log_probs_of(one), strict=True):
            assert found == pytest.approx(wanted, abs=1e-5)
    assert read_published(made / "two").sha256 != read_published(made / "two-updated").sha256
