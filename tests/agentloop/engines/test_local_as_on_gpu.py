"""What a GPU samples by under autocast: a rounded copy of weights."""

from dataclasses import replace
from functools import partial

import peft
import pytest
import torch
from torch import nn
from transformers import (
    PreTrainedModel,
)

from agentloop.config.sections.model import ComputeSection
from agentloop.engines import Completion, GenerationRequest
from agentloop.engines.local.local_generator import LocalGenerator
from agentloop.models.actor import Actor
from agentloop.training.startup_checks import check_scoring
from tests.agentloop.engines.test_local import VOCABULARY, conversation, llama, played

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])])
BFLOAT16 = ComputeSection(autocast="bfloat16")


def on(device: str) -> PreTrainedModel:
    return llama().to(device)  # type: ignore[arg-type]


def tolerance(device: str) -> float:
    return 1e-5 if device == "cpu" else 1e-4


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
@pytest.mark.parametrize(("as_on_gpu", "compute"), [(False, None), (True, BFLOAT16)])
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
