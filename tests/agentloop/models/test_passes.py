"""How a pass is made changes speed, memory and rounding, and nothing else."""

from collections.abc import Iterable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from agentloop.config import RunConfig
from agentloop.config.sections.model import ComputeSection
from agentloop.engines import GenerationRequest
from agentloop.engines.local.local_generator import LocalGenerator
from agentloop.errors import UserError
from agentloop.models.actor import Actor
from agentloop.models.backbone_passes import Passes, describe_types
from tests.agentloop.models.test_actor import ATTENTION, IDS, RESPONSE, TEMPERATURE
from tests.fakes.tiny_actors import tiny_actor

RECOMPUTED = ComputeSection(gradient_checkpointing=True)
BFLOAT16 = ComputeSection(autocast="bfloat16")


def differentiated(actor: Actor) -> tuple[Tensor, Tensor]:
    """Log-probs, and the gradient of their sum with the entropies'."""
    actor.model.zero_grad(set_to_none=True)
    log_probs, entropies = actor.log_probs(IDS, ATTENTION, RESPONSE, TEMPERATURE)
    torch.autograd.backward((log_probs + entropies).sum())
    grads = [parameter.grad for parameter in actor.model.parameters() if parameter.grad is not None]
    return log_probs.detach(), torch.cat([grad.flatten() for grad in grads])


def calls_of_layers(actor: Actor) -> list[int]:
    """Numbers of the layers, as they are run."""
    calls: list[int] = []
    for number, layer in enumerate(actor.model.model.layers):
        layer.self_attn.register_forward_hook(lambda *call, number=number: calls.append(number))
    return calls


def test_activations_made_again_give_the_same_gradient() -> None:
    plain = tiny_actor()
    calls = calls_of_layers(plain)
    wanted = differentiated(plain)
    assert calls == [0, 1]
    calls.clear()
    recomputing = Actor(plain.model, compute=RECOMPUTED)
    found = differentiated(recomputing)
    assert calls == [0, 1, 1, 0]  # again in backward, the last first
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    calls.clear()
    with torch.no_grad():
        recomputing.log_probs(IDS, ATTENTION, RESPONSE, TEMPERATURE)
    assert calls == [0, 1]
    assert all("forward" not in layer.__dict__ for layer in plain.model.model.layers)


def test_backbone_without_layers_to_make_again_is_refused() -> None:
    with pytest.raises(UserError, match=r"^compute\.gradient_checkpointing must be false for a model without layers"):
        Passes(nn.Linear(2, 2), torch.device("cpu"), RECOMPUTED)


def test_bfloat16_scores_stay_near_and_weights_and_gradients_stay_float32() -> None:
    plain = tiny_actor(torch.float32)
    half = Actor(plain.model, compute=BFLOAT16)
    wanted, found = differentiated(plain), differentiated(half)
    # 8 bits of mantissa, wide initial weights: a twentieth of a nat, and a tenth of the largest gradient.
    assert 0 < (found[0] - wanted[0]).abs().max() < 0.05
    assert (found[1] - wanted[1]).abs().max() < 0.1 * wanted[1].abs().max()
    assert found[0].dtype == found[1].dtype == torch.float32
    assert (plain.half_precision, half.half_precision) == (False, True)


def test_a_cpu_multiplies_in_the_type_of_the_weights_unless_bfloat16_is_asked_for() -> None:
    model = tiny_actor(torch.float32).model
    unset, none = Actor(model), Actor(model, compute=ComputeSection(autocast="none"))
    assert (RunConfig().compute.autocast, unset.compute.autocast) == ("auto", "none")
    for one, other in zip(differentiated(unset), differentiated(none), strict=True):
        assert torch.equal(one, other)
    assert Actor(model, compute=BFLOAT16).compute.autocast == "bfloat16"
    assert [Actor(model, packs=packs).packs for packs in (None, False, True)] == [False, False, True]
    assert Actor(model.to(torch.bfloat16)).compute.autocast == "none"


@pytest.mark.parametrize(
    ("weights", "autocast", "times", "said"),
    [
        ("float32", "auto", 28.31, ""),
        ("float32", "auto", 0.5, ". Products in bfloat16 are about 2 times quicker here: compute.autocast: bfloat16"),
        ("float32", "bfloat16", 28.31, "28 times slower than in float32 here. Quicker: compute.autocast: none"),
        ("bfloat16", "auto", 28.31, "28 times slower than in float32 here. Quicker: model.dtype: float32"),
        ("float32", "bfloat16", 0.5, ""),
    ],
)
def test_the_start_says_what_a_slow_type_costs_and_auto_does_not_choose_it(
    weights: str, autocast: Literal["auto", "bfloat16"], times: float, said: str
) -> None:
    actor = Actor(tiny_actor(getattr(torch, weights)).model, compute=ComputeSection(autocast=autocast))
    products = weights if autocast == "auto" else autocast
    line = describe_types(actor.model, actor.compute, measure=lambda *_, **__: times)
    assert line.startswith(f"computing on cpu: weights in {weights}, products in {products}")
    assert line.endswith(said or f"products in {products}")


class Casts(TorchDispatchMode):
    """How often each of some tensors is copied into another type."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.times = {tensor.data_ptr(): 0 for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten._to_copy and args[0].data_ptr() in self.times:
            self.times[args[0].data_ptr()] += 1
        return func(*args, **(kwargs or {}))


def test_sampling_casts_a_weight_once_whatever_it_samples() -> None:
    model = tiny_actor(torch.float32).model
    generator = LocalGenerator(model, stop_ids=frozenset(), compute=BFLOAT16)
    generator.begin(seed=0, temperature=1.0)
    with Casts(model.parameters()) as casts:
        (said,) = generator.generate([GenerationRequest(0, [3, 4, 5], 4)])
    assert len(said.token_ids) == 4
    assert set(casts.times.values()) == {0, 1}  # vectors of norms are not multiplied
