"""Weights get into a server through memory, under the names of files, also while it is asleep; and are proved."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx2
import pytest
import torch
from safetensors import safe_open

from agentloop.config import ModelSection
from agentloop.engines.publish.engine_control import ASLEEP, EngineControl, EngineRefused
from agentloop.engines.publish.proof import ProofFailed, bring, prove, publish
from agentloop.models.loading import LoadedModel, load_model
from agentloop.models.policy_weights import PolicyWeights
from agentloop.training.policies.weights_for_engines import tensors_of_files
from tests.fakes.engine_server import EngineServer, serving
from tests.fakes.published_policies import by_value, published, step, tiny_learner
from tests.fakes.runs import save_qwen2


@pytest.fixture
def learner(tmp_path: Path) -> LoadedModel:
    return tiny_learner(tmp_path / "model")


@pytest.fixture
def server(tmp_path: Path, learner: LoadedModel) -> Iterator[EngineServer]:
    with serving(tmp_path / "model", transfers=True) as server:
        yield server


@pytest.fixture
def control(server: EngineServer) -> Iterator[EngineControl]:
    with EngineControl(server.address, model="tiny") as control:
        yield control


@pytest.mark.parametrize("tied", [True, False])
def test_shared_tensors_are_those_of_the_published_files(tmp_path: Path, tied: bool, learner: LoadedModel) -> None:
    untied = save_qwen2(tmp_path / "untied")
    loaded = learner if tied else load_model(ModelSection(path=str(untied)), untied)
    published(tmp_path / "000000", loaded)
    shared = tensors_of_files(PolicyWeights(loaded.model))
    files = [safe_open(path, framework="pt") for path in (tmp_path / "000000").glob("*.safetensors")]
    written = {name: file.get_tensor(name) for file in files for name in file.keys()}  # noqa: SIM118
    assert shared.keys() == written.keys()
    assert all(torch.equal(shared[name], tensor) for name, tensor in written.items())


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_sleeping_engine_is_woken_with_new_weights_alone(
    tmp_path: Path, learner: LoadedModel, server: EngineServer, control: EngineControl, in_memory: bool
) -> None:
    policy = published(tmp_path / "000000", learner)
    publish(control, tmp_path / "000000")
    control.sleep(2)
    with pytest.raises(EngineRefused, match="asleep: kv_cache, weights"):
        control.scored([5, 6], temperature=1.0, model="tiny")
    httpx2.post(f"{control.url}/wake_up").raise_for_status()
    with pytest.raises(ProofFailed, match=f"must call its weights so, got '{ASLEEP}'"):
        prove(control, policy)
    control.name_weights(policy.label)
    with pytest.raises(ProofFailed, match="they differ by .* nats where rounding explains"):
        prove(control, policy)
    control.sleep(2)
    step(learner, seed=1)
    policy = published(tmp_path / "000001", learner, version=1)
    source = partial(by_value, PolicyWeights(learner.model)) if in_memory else tmp_path / "000001"
    assert bring(control, policy, source, record=tmp_path / "proofs.jsonl").holds
    assert server.models.asleep == set() and control.label() == policy.label
    assert control.wake_s > 0
