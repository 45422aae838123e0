"""What two ranks publish is what one rank publishes, and no rank has the policy whole meanwhile."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.models.mixtral import MixtralConfig, MixtralForCausalLM

from agentloop.distributed.ranks import ALONE, Ranks
from agentloop.engines.publish.published_policy import RECORD, read_published
from agentloop.errors import UserError
from agentloop.models.policy_weights import PolicyWeights, stream_tensors
from tests.agentloop.distributed import ranked_publishes
from tests.agentloop.distributed.ranked_publishes import NAMES, PARTS, loaded_policy, publish
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
    (folder / "files").mkdir()
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


def test_two_ranks_write_several_files_as_one_does(published: Path, tmp_path: Path) -> None:
    loaded = loaded_policy(published, "tied")
    PolicyWeights(loaded.model, largest_file=PARTS).save(tmp_path / "one")
    ours, theirs = bytes_of(published / "files" / "two"), bytes_of(tmp_path / "one")
    assert "model.safetensors.index.json" in theirs
    assert len(theirs) > 5
    assert ours == theirs


def test_streamed_file_is_that_of_safetensors(tmp_path: Path) -> None:
    kinds = [torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.int32, torch.float32, torch.float64]
    tensors = {f"layer.{place}": torch.arange(15).view(3, 5).to(kind) for place, kind in enumerate(kinds)}
    tensors |= {"a": torch.ones(3), "é": torch.zeros(1), "none": torch.zeros(0, 2), "z": torch.arange(2)}
    stream_tensors(tmp_path / "ours", tensors, ALONE)
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    with pytest.raises(ValueError, match="complex64"):
        stream_tensors(tmp_path / "c", {"c": torch.zeros(1, dtype=torch.complex64)}, ALONE)


def test_model_whose_files_hold_other_weights_is_refused_on_several_ranks(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(vocab_size=11, num_key_value_heads=1, num_local_experts=2, **sizes)
    # Stacked in the model, one by one in its files.
    with pytest.raises(UserError, match=r"model.path must be a model whose files .* got MixtralForCausalLM"):
        PolicyWeights(MixtralForCausalLM(config), Ranks(0, 2)).save(tmp_path)
