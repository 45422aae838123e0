"""What a GPU samples by: keys and values in fixed buffers, a rounded copy of weights. On a CPU no step is recorded."""

from dataclasses import replace
from functools import partial
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from agentloop.config.sections.model import ComputeSection
from agentloop.engines import Completion, GenerationRequest
from agentloop.engines.local.fixed_cache import FixedCache
from agentloop.engines.local.local_generator import LocalGenerator
from agentloop.models.actor import Actor
from agentloop.training.startup_checks import check_scoring
from tests.agentloop.engines.test_local import CASES, VOCABULARY, conversation, fed_shapes, llama, played, windowed

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])])
BFLOAT16 = ComputeSection(autocast="bfloat16")
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}


def on(device: str) -> PreTrainedModel:
    return llama().to(device)  # type: ignore[arg-type]


def tolerance(device: str) -> float:
    return 1e-5 if device == "cpu" else 1e-4


@pytest.fixture(autouse=True)
def few_tokens_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beginnings are shared, and rows shown apart, where a GPU would not care for so few tokens."""
    monkeypatch.setattr(FixedCache, "tokens_per_call", 16)


def test_padding_has_a_position_that_the_model_knows() -> None:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 80, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes)).eval()
    assert FixedCache.suits(model)
    assert conversation(model, as_on_gpu=True) < tolerance("cpu")


@DEVICES
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fixed_buffers_sample_what_growing_ones_do(case: dict[str, Any], device: str) -> None:
    model = on(device)
    growing, fixed = (played(model, as_on_gpu=chosen, **case) for chosen in (False, True))
    for (prompt, reply), (other_prompt, other) in zip(growing, fixed, strict=True):
        assert (prompt, reply.token_ids) == (other_prompt, other.token_ids)
        assert other.log_probs == pytest.approx(reply.log_probs, abs=tolerance(device))
        assert other.entropies == pytest.approx(reply.entropies, abs=tolerance(device))


@DEVICES
def test_same_seed_gives_the_same_bits_whatever_was_sampled_before(device: str) -> None:
    def sample(engine: LocalGenerator, *, episodes: int, tokens: int) -> list[Any]:
        engine.begin(seed=5, temperature=1.0)
        return engine.generate([GenerationRequest(e, [8, 9, 10 + e], tokens) for e in range(episodes)])

    used, new = (LocalGenerator(on(device), stop_ids=frozenset(), as_on_gpu=True) for _ in range(2))
    sample(used, episodes=20, tokens=300)
    assert sample(used, episodes=9, tokens=12) == sample(new, episodes=9, tokens=12)
    shapes = fed_shapes(used.model)
    used.generate([GenerationRequest(e, [40 + e, 50], 2 + 2 * e) for e in range(20)])
    # 20 rows are a step of 32; half of them have ended after 20 tokens: 10 are one of 16, 5 one of 8.
    if device == "cpu":
        assert shapes[0] == (20, 2) and list(dict.fromkeys(shapes[1:])) == [(32, 1), (16, 1), (8, 1)]


@pytest.mark.gpu
@NO_CUDA
@pytest.mark.parametrize("compute", [None, BFLOAT16], ids=["float32", "copy"])
def test_recorded_steps_are_replayed_after_a_publish_with_the_new_weights(compute: ComputeSection | None) -> None:
    model = on("cuda")
    engine = LocalGenerator(model, stop_ids=frozenset(), compute=compute)
    shapes = fed_shapes(engine.model)

    def sample(version: int) -> tuple[float, ...]:
        engine.published(version)
        engine.begin(seed=0, temperature=1.0)
        return engine.generate([GenerationRequest(e, [8 + e, 9], 6) for e in range(9)])[0].log_probs

    first = sample(1)
    shapes.clear()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    changed = sample(2)
    assert shapes == [(9, 2)]  # the prompts; what is replayed is no call
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert sample(3) == changed != first


@DEVICES
def test_rounded_copy_samples_what_autocast_does(device: str) -> None:
    model = on(device)
    copied, autocast, exact = (
        played(model, as_on_gpu=chosen, compute=compute)[0][1].log_probs
        for chosen, compute in ((True, BFLOAT16), (False, BFLOAT16), (True, None))
    )
    assert copied == pytest.approx(autocast, abs=0.05)  # 8 bits of mantissa, wide initial weights
    assert copied != exact
    assert conversation(model, as_on_gpu=True, compute=BFLOAT16) < 0.2
    generator = LocalGenerator(model, stop_ids=frozenset(), as_on_gpu=True, compute=BFLOAT16)
    check_scoring(generator, Actor(model, compute=BFLOAT16))
    kinds = {name.split(".")[-2]: parameter.dtype for name, parameter in generator.model.named_parameters()}
    assert (kinds["q_proj"], kinds["lm_head"], kinds["norm"]) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@DEVICES
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("as_on_gpu", "compute"), [(False, None), (True, None), (True, BFLOAT16)])
def test_a_publish_forgets_keys_and_takes_the_new_weights(
    as_on_gpu: bool, compute: ComputeSection | None, tied: bool, device: str
) -> None:
    model = on(device)
    new_engine = partial(LocalGenerator, model, stop_ids=frozenset(), as_on_gpu=as_on_gpu, compute=compute)
    if tied:
        model.set_output_embeddings(nn.Linear(32, VOCABULARY, bias=False, device=device))
        model.get_output_embeddings().weight = model.get_input_embeddings().weight

    def sampled(engine: LocalGenerator, prompt: list[int]) -> Completion:
        return replace(engine.generate([GenerationRequest(0, prompt, 6)])[0], policy_version=0)

    old = new_engine()
    old.begin(seed=0, temperature=0.0)
    first = sampled(old, [8, 9])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    old.published(1)
    new = new_engine()
    new.begin(seed=0, temperature=0.0)
    prompt = [8, 9, *first.token_ids, 10]
    assert sampled(old, prompt) == sampled(new, prompt)
    assert sampled(new, [8, 9]) != first


@DEVICES
def test_rounded_copy_has_the_adapters_too(device: str) -> None:
    model = llama()
    model.add_adapter(peft.LoraConfig(r=2, lora_alpha=8, target_modules="all-linear", init_lora_weights=False))
    model = model.to(device)  # type: ignore[arg-type]
    assert conversation(model, as_on_gpu=True) < tolerance(device)
    assert conversation(model, as_on_gpu=True, compute=BFLOAT16) < 0.5
    model.disable_adapters()
    plain = conversation(model, as_on_gpu=True)
    assert plain < tolerance(device)


def test_models_that_fixed_buffers_do_not_suit_are_sampled_as_on_a_cpu() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    dynamic = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, rope_parameters=rope)).eval()
    experts = MixtralForCausalLM(MixtralConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)).eval()
    assert FixedCache.suits(llama())
    for model in (windowed(), llama("eager"), dynamic, experts):
        assert not FixedCache.suits(model)
        assert played(model, as_on_gpu=True) == played(model, as_on_gpu=False)


def test_memory_of_keys_and_values_is_that_of_the_buffers() -> None:
    engine = LocalGenerator(llama(), stop_ids=frozenset(), as_on_gpu=True)
    assert engine.bytes_of(10, 256) == 0
    engine.generate([GenerationRequest(0, [8, 9], 1)])
    # 10 rows are 16; 256 columns and one for padding; 2 layers x keys, values x 2 heads x 8 numbers x 4 bytes.
    assert engine.bytes_of(10, 256) == 16 * 257 * 2 * 2 * 2 * 8 * 4
    assert LocalGenerator(llama(), stop_ids=frozenset()).bytes_of(10, 256) == 0
