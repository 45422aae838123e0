"""A number names the same bytes for ever: what is read is what was published, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentloop.engines.publish.published_policy import (
    MARKER,
    RECORD,
    newest_published,
    read_published,
    version_in,
)
from agentloop.errors import UserError
from agentloop.models.loading import LoadedModel
from agentloop.runs.run_folder import COMPLETE
from tests.fakes.published_policies import published, tiny_learner


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_learner(tmp_path_factory.mktemp("model"))


def test_what_is_written_is_read(tmp_path: Path, learner: LoadedModel) -> None:
    policy = published(tmp_path / "000003", learner, version=3)
    assert read_published(tmp_path / "000003") == policy
    assert (policy.label, policy.kind) == (f"tiny@3-{policy.sha256[:8]}", "full")
    assert version_in(policy.label, "tiny") == 3
    assert [version_in(name, "tiny") for name in ("tiny", "tiny@3", f"a.{policy.label}", "tiny2@3-00000000")] == [
        None
    ] * 4


def test_head_is_written_apart_from_the_embeddings(tmp_path: Path, learner: LoadedModel) -> None:
    assert learner.model.config.tie_word_embeddings
    published(tmp_path / "000000", learner)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "000000")
    assert not again.config.tie_word_embeddings
    assert again.lm_head.weight is not again.model.embed_tokens.weight
    for (name, ours), (same, theirs) in zip(learner.model.named_parameters(), again.named_parameters(), strict=False):
        assert name == same and torch.equal(ours, theirs)
    assert torch.equal(again.lm_head.weight, learner.model.lm_head.weight)


def test_same_weights_have_the_same_hash(tmp_path: Path, learner: LoadedModel) -> None:
    hashes = {published(tmp_path / name, learner, version=version).sha256 for version, name in enumerate("ab")}
    assert len(hashes) == 1


def test_changed_byte_is_refused(tmp_path: Path, learner: LoadedModel) -> None:
    published(tmp_path / "000000", learner)
    weights = tmp_path / "000000" / "model-head.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UserError, match="must be the bytes that were published, got sha256"):
        read_published(tmp_path / "000000")


def test_half_a_folder_is_refused(tmp_path: Path, learner: LoadedModel) -> None:
    assert MARKER == COMPLETE
    published(tmp_path / "000000", learner)
    (tmp_path / "000000" / MARKER).unlink()
    with pytest.raises(UserError, match="must be whole, got no COMPLETE"):
        read_published(tmp_path / "000000")


def test_folder_without_a_record_is_refused(tmp_path: Path, learner: LoadedModel) -> None:
    published(tmp_path / "000000", learner)
    (tmp_path / "000000" / RECORD).write_text('{"run": "tiny"}')
    with pytest.raises(UserError, match=r"must have a published.json, got \d mistakes in it"):
        read_published(tmp_path / "000000")


def test_newest_is_the_highest_whole_number(tmp_path: Path, learner: LoadedModel) -> None:
    assert newest_published(tmp_path / "nowhere") is None
    for version in (2, 10, 11):
        published(tmp_path / f"{version:06d}", learner, version=version)
    (tmp_path / "000011" / MARKER).unlink()
    (tmp_path / "notes").mkdir()
    assert newest_published(tmp_path) == tmp_path / "000010"
