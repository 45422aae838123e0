"""Log-probs made inside the model's own forward: those of the plain path, whatever the model is."""

from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import Cohere2Config, Cohere2ForCausalLM, PreTrainedModel

from agentloop.models.actor import Actor
from agentloop.models.adapters import WithoutAdapters
from agentloop.models.token_log_probs.head import Head
from tests.agentloop.models.test_actor import ATTENTION, IDS, RESPONSE, TEMPERATURE
from tests.fakes.batch_rows import VOCABULARY
from tests.fakes.tiny_actors import tiny_actor

PLAIN, CHUNKED = 10**9, 0
"""Most bytes of logits that are made at once."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2 of the 5 action tokens, and 7 of the 23 words."""
    monkeypatch.setattr("agentloop.models.token_log_probs.chunked.CPU_CHUNKS", (2, 7))


def scored(actor: Actor, most: int) -> tuple[Tensor, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentloop.models.token_log_probs.head._PLAIN_BYTES", most)
        return actor.log_probs(IDS, ATTENTION, RESPONSE, TEMPERATURE)


def scores(model: PreTrainedModel, most: int) -> tuple[Tensor, Tensor]:
    return scored(Actor(model), most)


def gradients(model: PreTrainedModel, most: int) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    log_probs, entropies = scores(model, most)
    torch.autograd.backward((log_probs * torch.arange(12.0).view(2, 6) + 0.3 * entropies).sum())
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [grad.clone() for grad in found]


def assert_equal(model: PreTrainedModel) -> None:
    for one, other in zip(scores(model, CHUNKED), scores(model, PLAIN), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    found, wanted = gradients(model, CHUNKED), gradients(model, PLAIN)
    assert any(bool(grad.any()) for grad in wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tied", [False, True])
def test_scores_and_gradients_are_those_of_the_plain_path(tied: bool) -> None:
    assert_equal(tiny_actor(tie_word_embeddings=tied).model)


def test_logits_are_never_made() -> None:
    model = tiny_actor().model
    widths: list[int] = []
    model.lm_head.register_forward_hook(lambda *call: widths.append(call[2].shape[-1]))
    scores(model, CHUNKED)
    # The model is asked once, with two tokens, whether it leaves logits alone; a log-prob and an entropy after that.
    assert widths == [VOCABULARY, 2]
    # Generation has the head it had, also after a pass that fails.
    assert model(input_ids=IDS).logits.shape == (2, 6, VOCABULARY)
    model.model.forward = None
    with pytest.raises(TypeError):
        scores(model, CHUNKED)
    assert "forward" not in model.lm_head.__dict__


def scaled() -> PreTrainedModel:
    """Logits that the model multiplies after the head."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Cohere2Config(vocab_size=VOCABULARY, num_key_value_heads=1, logit_scale=0.5, pad_token_id=0, **sizes)
    return Cohere2ForCausalLM(config).double().eval()


def adapted() -> PreTrainedModel:
    """A head that is more than one product."""
    model = tiny_actor(tie_word_embeddings=False).model
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    return model


def biased() -> PreTrainedModel:
    model = tiny_actor(tie_word_embeddings=False).model
    model.lm_head = nn.Linear(16, VOCABULARY, dtype=torch.float64)
    return model


@pytest.mark.parametrize("make", [scaled, adapted, biased])
def test_model_with_own_logits_takes_the_plain_path(make: Any) -> None:
    model = make()
    for one, other in zip(scores(model, CHUNKED), scores(model, PLAIN), strict=True):
        assert torch.equal(one, other)


def test_reference_without_adapters_scores_alike() -> None:
    model = tiny_actor().model
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model._hf_peft_config_loaded = True
    calls: list[int] = []
    hook = model.model.register_forward_hook(lambda *call: calls.append(1))
    reference = WithoutAdapters(actor := Actor(model))
    actor.probe()
    assert len(calls) == 1
    scored(reference, CHUNKED)
    assert len(calls) == 2  # of ranks, one that asks again would wait for the others in vain
    hook.remove()
    assert_equal(model)
    found, wanted = (scored(WithoutAdapters(Actor(model)), most) for most in (CHUNKED, PLAIN))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(found[0], scores(model, PLAIN)[0])


def test_automatic_choice_is_chunks_above_64_mebibytes_of_logits() -> None:
    head = Head(tiny_actor().model)
    # 64 MiB / 4 bytes / 23 words = 729,444.2 tokens
    assert head.choose_chunks(729_444) is None
    assert head.choose_chunks(729_445) is not None
