"""An engine samples under a version only after its log-probs have been the learner's."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentloop.engines.publish.proof import ProofFailed, prove, publish
from agentloop.engines.publish.published_policy import read_published
from agentloop.models.loading import LoadedModel
from tests.fakes.learner_engine import LearnerEngine
from tests.fakes.published_policies import OTHER_TEXT, label, published, step, tiny_learner, with_adapter


@pytest.fixture
def learner(tmp_path: Path) -> LoadedModel:
    learner = tiny_learner(tmp_path / "model")
    published(tmp_path / "000000", learner)
    return learner


def test_publish_proves_each_version(tmp_path: Path, learner: LoadedModel) -> None:
    engine = LearnerEngine(tmp_path / "000000")
    for version in (1, 2):
        step(learner, seed=version)
        policy = published(tmp_path / f"{version:06d}", learner, version=version)
        proof = publish(engine, tmp_path / f"{version:06d}")
        # 8 texts, and the 20 likeliest tokens after each
        assert proof.sampling.tokens == 160 and proof.difference < 1e-5
        assert engine.label() == policy.label


def test_publish_sends_nothing_to_an_engine_that_proves_it(tmp_path: Path, learner: LoadedModel) -> None:
    engine = LearnerEngine(tmp_path / "000000")
    publish(engine, tmp_path / "000000")
    publish(engine, tmp_path / "000000")
    assert engine.calls == [f"reload {label(tmp_path / '000000')}"]


def test_publish_reloads_what_bears_the_name_alone(tmp_path: Path, learner: LoadedModel) -> None:
    engine = LearnerEngine(tmp_path / "000000")
    step(learner, seed=1)
    policy = published(tmp_path / "000001", learner, version=1)
    engine.name_weights(policy.label)
    assert publish(engine, tmp_path / "000001").difference < 1e-5
    assert engine.calls == [f"reload {policy.label}"]


def test_head_that_stays_old_is_refused(tmp_path: Path, learner: LoadedModel) -> None:
    engine = LearnerEngine(tmp_path / "000000")
    engine.head_stays_old = True
    step(learner, seed=1)
    published(tmp_path / "000001", learner, version=1)
    expected = r"^the engine at http://fake, published tiny@1-\w{8}, must sample .* differ by \d.* of a head tied"
    with pytest.raises(ProofFailed, match=expected):
        publish(engine, tmp_path / "000001")
    assert engine.label() == f"unproved {label(tmp_path / '000001')}"


def test_log_probs_from_before_the_temperature_are_refused_by_their_name(tmp_path: Path, learner: LoadedModel) -> None:
    engine = LearnerEngine(tmp_path / "000000")
    engine.before_temperature = True
    with pytest.raises(ProofFailed, match="log-probs from before the temperature: start it with --logprobs-mode"):
        publish(engine, tmp_path / "000000")
    published(tmp_path / "one", learner, run="one", temperature=1.0)
    assert publish(engine, tmp_path / "one").difference < 1e-5


def test_what_is_no_number_is_refused(tmp_path: Path, learner: LoadedModel) -> None:
    engine = LearnerEngine(tmp_path / "000000")
    engine.gives_nan = True
    with pytest.raises(ProofFailed, match="got nan of token .*; next tokens differ by inf nats"):
        publish(engine, tmp_path / "000000")


def test_restarted_engine_is_refused_by_its_label(tmp_path: Path, learner: LoadedModel) -> None:
    engine = LearnerEngine(tmp_path / "000000")
    publish(engine, tmp_path / "000000")
    engine.restart()
    with pytest.raises(ProofFailed, match="must call its weights so, got 'default'"):
        prove(engine, read_published(tmp_path / "000000"))


def test_another_model_of_the_same_shape_is_refused(tmp_path: Path, learner: LoadedModel) -> None:
    other = tiny_learner(tmp_path / "other", seed=1)
    policy = published(tmp_path / "000001", other, run="other", version=1)
    engine = LearnerEngine(tmp_path / "000000")
    engine.name_weights(policy.label)
    with pytest.raises(ProofFailed, match="been started from another model"):
        prove(engine, policy)


def test_another_tokenizer_is_refused(tmp_path: Path, learner: LoadedModel) -> None:
    other = tiny_learner(tmp_path / "other", corpus=OTHER_TEXT)
    policy = published(tmp_path / "000001", other, run="other", version=1)
    engine = LearnerEngine(tmp_path / "000000")
    engine.name_weights(policy.label)
    with pytest.raises(ProofFailed, match="must have the learner's tokenizer"):
        prove(engine, policy)
    # Their weights are equal, so that nothing but the tokenizer tells them apart.
    engine.has_tokenizer = False
    assert prove(engine, policy).difference < 1e-5


def test_adapters_are_proved_by_name_and_older_ones_go(tmp_path: Path, learner: LoadedModel) -> None:
    engine = LearnerEngine(tmp_path / "000000")
    adapted = with_adapter(tmp_path / "000000", learner)
    engine.load_adapter("of another run", _adapter(tmp_path / "x", adapted, version=0))
    for version in range(1, 5):
        step(adapted, seed=version, size=0.1)
        folder = _adapter(tmp_path / f"{version:06d}", adapted, version=version)
        assert publish(engine, folder).difference < 1e-5
    assert engine.adapters() == ["of another run", label(tmp_path / "000003"), label(tmp_path / "000004")]


def test_adapter_that_fails_its_proof_is_unloaded(tmp_path: Path, learner: LoadedModel) -> None:
    other = tiny_learner(tmp_path / "other", seed=1)
    published(tmp_path / "other-base", other)
    adapted = with_adapter(tmp_path / "other-base", other)
    engine = LearnerEngine(tmp_path / "000000")
    with pytest.raises(ProofFailed, match=r"published tiny@1-\w{8}, must sample with the learner's log-probs"):
        publish(engine, _adapter(tmp_path / "000001", adapted, version=1))
    assert engine.adapters() == []


def _adapter(target: Path, learner: LoadedModel, *, version: int) -> Path:
    assert published(target, learner, version=version).kind == "lora"
    return target
