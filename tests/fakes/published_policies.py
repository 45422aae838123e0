"""Tiny policies on disk, published as a learner publishes them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentloop.config import ModelSection, TinyModelSection
from agentloop.engines.publish.published_policy import NumberType, PublishedPolicy, read_published
from agentloop.models.loading import LoadedModel, load_model, muted_libraries
from agentloop.models.policy_weights import PolicyWeights
from agentloop.models.tiny import build_tiny_model
from agentloop.training.policies.engine_publisher import Prober
from agentloop.training.policies.weights_for_engines import tensors_of_files, wire_update, write_published

TEXT = [f"the quick brown fox {number} jumps over {number} lazy dogs" for number in range(200)]


def tiny_learner(folder: Path, *, seed: int = 0) -> LoadedModel:
    """A model with random weights and a head tied to its embeddings, as a learner loads it."""
    build_tiny_model(folder, TinyModelSection(vocabulary=300), corpus=TEXT, seed=seed)
    return load_model(ModelSection(path=str(folder)), folder)


def save(loaded: LoadedModel) -> Callable[[Path], None]:
    def write(target: Path) -> None:
        with muted_libraries():
            loaded.model.save_pretrained(target)
        loaded.tokenizer.save_pretrained(target)

    return write


def prober(loaded: LoadedModel, *, number_type: NumberType = "float32", temperature: float = 0.7) -> Prober:
    return Prober(PolicyWeights(loaded.model), number_type, temperature)


def published(
    target: Path,
    loaded: LoadedModel,
    *,
    run: str = "tiny",
    version: int = 0,
    temperature: float = 0.7,
    probes: Prober | None = None,
) -> PublishedPolicy:
    """`probes` None: the weights before are not known."""
    weights = PolicyWeights(loaded.model)
    probe = (probes or prober(loaded, temperature=temperature)).probe(loaded.tokenizer)
    return write_published(target, weights, save(loaded), probe=probe, run=run, version=version)


@contextmanager
def by_value(weights: PolicyWeights) -> Iterator[dict[str, Any]]:
    """What a GPU's memory would be shared with: the test server takes tensors in the place of their handles."""
    tensors = tensors_of_files(weights)
    yield wire_update(tensors, [{"cpu": tensor.detach().clone()} for tensor in tensors.values()])


def label(folder: Path) -> str:
    """What engines call the policy in this folder."""
    return read_published(folder).label


def step(loaded: LoadedModel, *, seed: int, size: float = 0.02) -> None:
    """Change every weight that is trained a little, as an update does."""
    model: Any = loaded.model
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def with_adapter(folder: Path, loaded: LoadedModel, *, rank: int = 4) -> LoadedModel:
    """The learner again, frozen, with a LoRA adapter of its own on it."""
    from peft import LoraConfig

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.add_adapter(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.eval()
    return LoadedModel(loaded.codec, loaded.template, loaded.stop_ids, model, tokenizer)
