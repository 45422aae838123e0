"""Rows one behind another: each sees itself, and what neighbours begin with is there once."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from agentloop.config.sections.model import ComputeSection
from agentloop.errors import UserError
from agentloop.models import row_attention
from agentloop.models.actor import Actor
from agentloop.models.backbone_passes import Passes
from agentloop.models.row_attention import Laid, knows_rows, packed
from tests.fakes.tiny_actors import SIZES, tiny_actor

IDS = torch.tensor([[1, 2, 3, 4, 5, 0], [1, 2, 3, 6, 7, 8], [1, 2, 3, 6, 7, 0], [9, 2, 3, 0, 0, 0]])
THERE = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]]).bool()
ACTION = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0]]).bool()
TEMPERATURE = torch.tensor([1.0, 0.7, 1.3, 1.0])


def models() -> list[PreTrainedModel]:
    torch.manual_seed(0)
    gpt2 = GPT2Config(vocab_size=23, n_positions=16, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3)
    made = [tiny_actor().model, LlamaForCausalLM(LlamaConfig(**SIZES)), GPT2LMHeadModel(gpt2)]
    return [model.double().eval() for model in made]


def differentiated(actor: Actor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, and the gradient of a sum of them in which each token has a weight of its own."""
    actor.model.zero_grad(set_to_none=True)
    log_probs, entropies = actor.log_probs(IDS, THERE, ACTION, TEMPERATURE)
    weights = torch.linspace(-1, 1, IDS.numel(), dtype=log_probs.dtype).view_as(log_probs)
    torch.autograd.backward((weights * log_probs + weights.square() * entropies).sum())
    gradients = [p.grad.flatten() for p in actor.model.parameters() if p.grad is not None]
    return torch.stack([log_probs, entropies]).detach(), torch.cat(gradients)


def test_what_a_row_begins_with_like_the_one_before_it_is_there_once() -> None:
    laid = packed(IDS, THERE)
    assert laid.inputs["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 7, 9, 2, 3]]
    assert laid.inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 3, 4, 5, 4, 0, 1, 2]]
    rows = laid.inputs["rows"]
    assert (rows.new, rows.whole) == ([5, 3, 1, 3], [5, 6, 5, 3])  # the third is all in the second: its last is kept
    assert laid.places[THERE].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7, 0, 1, 2, 5, 8, 9, 10, 11]
    assert rows.places.tolist() == laid.places[THERE].tolist()
    assert packed(IDS[2:], THERE[2:]).inputs["rows"].places is None  # they share nothing
    assert (rows.new_bounds.tolist(), rows.whole_bounds.tolist()) == ([0, 5, 8, 9, 12], [0, 5, 11, 16, 19])


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("model", models(), ids=lambda model: type(model).__name__)
def test_shared_beginnings_have_the_scores_and_gradient_of_padding(model: PreTrainedModel, recomputes: bool) -> None:
    assert knows_rows(model.base_model)
    compute = ComputeSection(gradient_checkpointing=recomputes)
    wanted, found = differentiated(Actor(model)), differentiated(Actor(model, packs=True, compute=compute))
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= 1e-6 * other.abs().max()  # rotary angles and norms are float32
    assert model.config._attn_implementation == "sdpa"


def test_attention_is_the_models_own_after_a_pass_that_fails() -> None:
    model = tiny_actor().model
    laid = packed(IDS, THERE)
    with pytest.raises(RuntimeError, match="size"), Passes(model.base_model, model.device, ComputeSection()).open(laid):
        model(**laid.inputs | {"position_ids": torch.zeros(1, 3, dtype=torch.int64)}, use_cache=False)
    assert model.config._attn_implementation == "sdpa"


def test_attention_that_is_more_than_full_or_else_is_not_replaced() -> None:
    windowed = Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    mamba = MambaConfig(vocab_size=23, hidden_size=16, num_hidden_layers=1, state_size=4)
    eager = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="eager"))
    others = [Qwen2ForCausalLM(windowed).base_model, MambaForCausalLM(mamba).base_model, eager.base_model]
    assert not any(map(knows_rows, [*others, nn.Linear(2, 2)]))
    with pytest.raises(UserError, match="batch.layout must be padded .*, got packed with LlamaForCausalLM .eager"):
        Actor(eager, packs=True)


class Calls(TorchDispatchMode):
    """Of flash-attention: the shapes of queries, keys and values, and what else it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[tuple[int, ...]], list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "varlen" in str(func):
            tensors = [tuple(arg.shape) for arg in args if isinstance(arg, Tensor)]
            self.seen.append((func.overloadpacket.__name__, tensors, [a for a in args if not isinstance(a, Tensor)]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recomputes", [False, True])
def test_flash_attention_is_told_where_rows_begin(recomputes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels need CUDA; shapes and arguments don't."""
    monkeypatch.setattr(row_attention, "has_flash", lambda device: True)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16().eval()
    laid = packed(IDS, THERE)
    rows = laid.inputs["rows"]
    arrays = {name: getattr(rows, name).to("meta") for name in ("places", "new_bounds", "whole_bounds")}
    inputs = {name: value.to("meta") for name, value in laid.inputs.items() if name != "rows"}
    there = Laid({**inputs, "rows": replace(rows, **arrays)}, laid.places)
    passes = Passes(model.base_model, torch.device("cpu"), ComputeSection(gradient_checkpointing=recomputes))
    with Calls() as calls:
        with passes.open(there):
            logits = model(**there.inputs, use_cache=False).logits
        torch.autograd.backward(logits.float().sum())
    assert logits.shape == (1, 12, 23)
    forward = [call for call in calls.seen if call[0] == "_varlen_attn"]
    assert len(forward) == (4 if recomputes else 2)
    assert len(calls.seen) - len(forward) == 2
    for _, tensors, rest in forward:
        assert tensors == [(12, 2, 8), (19, 1, 8), (19, 1, 8), (5,), (5,)]
        assert rest[:3] == [5, 6, True]  # the most new tokens, the longest row, causal
        assert rest[3] == pytest.approx(8**-0.5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_packs_by_default_and_scores_as_padded_rows_do() -> None:
    model = tiny_actor(torch.float32).model.to("cuda")
    arrays = [array.to("cuda") for array in (IDS, THERE, ACTION, TEMPERATURE)]
    found = {}
    for packs in (None, False):
        actor = Actor(model, packs=packs)
        assert actor.packs == (packs is None)
        model.zero_grad(set_to_none=True)
        log_probs, _ = actor.log_probs(*arrays)
        torch.autograd.backward(log_probs.sum())
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found[packs] = log_probs.detach(), gradient
    (log_probs, gradient), (wanted, wanted_gradient) = found.values()
    assert (log_probs - wanted).abs().max() <= 0.05
    assert torch.cosine_similarity(gradient, wanted_gradient, dim=0) >= 0.999
