"""An engine samples under a version only after its log-probs have been the learner's."""

from pathlib import Path

import pytest

from agentloop.engines.publish.engine_control import EngineControl
from agentloop.engines.publish.proof import ProofFailed, prove, publish
from agentloop.engines.publish.published_policy import read_published
from agentloop.models.loading import LoadedModel
from tests.fakes.engine_server import EngineServer
from tests.fakes.published_policies import label, published, step, tiny_learner, with_adapter


def test_publish_proves_each_version_and_sends_what_is_not_there(
    tmp_path: Path, learner: LoadedModel, engine: EngineControl, server: EngineServer
) -> None:
    for version in (1, 2):
        step(learner, seed=version)
        policy = published(tmp_path / f"{version:06d}", learner, version=version)
        proof = publish(engine, tmp_path / f"{version:06d}")
        # 8 texts, and the 20 likeliest tokens after each
        assert proof.sampling.tokens == 160 and proof.weights.difference < 1e-5
        assert engine.label() == policy.label
    publish(engine, tmp_path / "000002")  # nothing is sent to an engine that proves it
    assert server.models.loaded == ["000001", "000002"]
    engine.name_weights(label(tmp_path / "000001"))  # and weights that bear the name alone are sent again
    assert publish(engine, tmp_path / "000001").weights.difference < 1e-5
    assert server.models.loaded[2:] == ["000001"]


def test_old_head_is_refused(tmp_path: Path, learner: LoadedModel, engine: EngineControl, server: EngineServer) -> None:
    server.models.head_stays_old = True
    step(learner, seed=1)
    published(tmp_path / "000001", learner, version=1)
    expected = r"^the engine at http://127.0.0.1:\d+, published tiny@1-\w{8}, must sample .* differ by \d.*"
    with pytest.raises(ProofFailed, match=expected):
        publish(engine, tmp_path / "000001")
    assert engine.label() == f"unproved {label(tmp_path / '000001')}"


def test_log_probs_from_before_the_temperature_are_refused_by_their_name(
    tmp_path: Path, learner: LoadedModel, engine: EngineControl, server: EngineServer
) -> None:
    server.models.before_temperature = True
    with pytest.raises(ProofFailed, match="Start it with --logprobs-mode .* from before the temperature"):
        publish(engine, tmp_path / "000000")
    published(tmp_path / "one", learner, run="one", temperature=1.0)
    assert publish(engine, tmp_path / "one").weights.difference < 1e-5


def test_nan_and_a_restarted_engine_are_refused(tmp_path: Path, engine: EngineControl, server: EngineServer) -> None:
    publish(engine, tmp_path / "000000")
    server.models.gives_nan = True
    with pytest.raises(ProofFailed, match="got nan of token .*; next tokens differ by inf nats"):
        publish(engine, tmp_path / "000000")
    server.models.restart()
    with pytest.raises(ProofFailed, match="must have this label for its weights, got 'default'"):
        prove(engine, read_published(tmp_path / "000000"))


def test_another_model_is_refused(tmp_path: Path, engine: EngineControl) -> None:
    model = published(tmp_path / "000001", tiny_learner(tmp_path / "a", seed=1), run="other", version=1)
    engine.name_weights(model.label)
    with pytest.raises(ProofFailed, match="been started from another model"):
        prove(engine, model)


@pytest.mark.slow
def test_adapters_are_proved_by_name_and_older_ones_go(
    tmp_path: Path, learner: LoadedModel, engine: EngineControl, server: EngineServer
) -> None:
    def adapter(learner: LoadedModel, version: int) -> Path:
        folder = tmp_path / f"adapter-{version}"
        assert published(folder, learner, version=version).kind == "lora"
        return folder

    adapted = with_adapter(tmp_path / "000000", learner)
    engine.load_adapter("of another run", adapter(adapted, 0))
    for version in range(1, 5):
        step(adapted, seed=version, size=0.1)
        assert publish(engine, adapter(adapted, version)).weights.difference < 1e-5
    names = ["of another run", *(label(tmp_path / f"adapter-{version}") for version in (3, 4))]
    assert engine.adapters() == names
    other = tiny_learner(tmp_path / "other", seed=1)
    published(tmp_path / "other-base", other)
    with pytest.raises(ProofFailed, match=r"published tiny@5-\w{8}, must sample with the learner's log-probs"):
        publish(engine, adapter(with_adapter(tmp_path / "other-base", other), 5))
    assert engine.adapters() == names  # one that fails its proof is unloaded
