"""A number names the same bytes for ever: what is read is what was published, or is refused."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentloop.engines.publish.published_policy import MARKER, RECORD, newest_published, read_published, version_in
from agentloop.errors import UserError
from agentloop.models.loading import LoadedModel
from agentloop.runs.run_folder import COMPLETE
from tests.fakes.published_policies import published, tiny_learner


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_learner(tmp_path_factory.mktemp("model"))


def test_published_policy_is_read_as_it_was_written(tmp_path: Path, learner: LoadedModel) -> None:
    policy = published(tmp_path / "000003", learner, version=3)
    assert read_published(tmp_path / "000003") == policy
    assert (policy.label, policy.kind) == (f"tiny@3-{policy.sha256[:8]}", "full")
    assert version_in(policy.label, "tiny") == 3
    assert [version_in(it, "tiny") for it in ("tiny", "tiny@3", f"a.{policy.label}", "tiny2@3-00000000")] == [None] * 4


def test_head_is_written_apart_from_the_embeddings(tmp_path: Path, learner: LoadedModel) -> None:
    assert learner.model.config.tie_word_embeddings
    published(tmp_path / "000000", learner)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "000000")
    assert not again.config.tie_word_embeddings
    assert again.lm_head.weight is not again.model.embed_tokens.weight
    for (name, ours), (same, theirs) in zip(learner.model.named_parameters(), again.named_parameters(), strict=False):
        assert name == same and torch.equal(ours, theirs)
    assert torch.equal(again.lm_head.weight, learner.model.lm_head.weight)


def test_newest_is_the_highest_whole_number(tmp_path: Path, learner: LoadedModel) -> None:
    assert newest_published(tmp_path / "nowhere") is None
    for version in (2, 10, 11):
        published(tmp_path / f"{version:06d}", learner, version=version)
    (tmp_path / "000011" / MARKER).unlink()
    (tmp_path / "notes").mkdir()
    assert newest_published(tmp_path) == tmp_path / "000010"


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("model-head.safetensors", b"other", "must be the bytes that were published, got sha256"),
        (RECORD, None, "must have a published.json, got No such file or directory in "),
        (RECORD, b'{"run": "tiny"}', r"must have a published.json, got \d mistakes in it"),
    ],
)
def test_others_are_refused(tmp_path: Path, learner: LoadedModel, file: str, content: bytes | None, said: str) -> None:
    first, second = (published(tmp_path / name, learner, version=version) for version, name in enumerate("ab"))
    assert (MARKER, first.sha256) == (COMPLETE, second.sha256)
    (tmp_path / "a" / file).unlink() if content is None else (tmp_path / "a" / file).write_bytes(content)
    with pytest.raises(UserError, match=said):
        read_published(tmp_path / "a")
