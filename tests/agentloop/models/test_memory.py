"""What a pass keeps for its backward, and what follows where it does not fit."""

from typing import Any

import pytest
import torch

from agentloop.config.sections.model import ComputeSection
from agentloop.config.sections.optimization import OptimizerSection
from agentloop.errors import UserError
from agentloop.learning.optimizer import WeightOptimizer
from agentloop.models.actor import Actor
from agentloop.models.memory import KeptForBackward, choose_checkpointing, fits, kept_for_backward
from tests.fakes.batch_rows import ragged
from tests.fakes.tiny_actors import run_config, tiny_actor, trainer

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def kept(layers: int, **compute: Any) -> KeptForBackward:
    return kept_for_backward(Actor(tiny_actor(num_hidden_layers=layers).model, compute=ComputeSection(**compute)))


def test_a_layer_whose_activations_are_made_again_keeps_its_input_alone() -> None:
    # 16 numbers of 8 bytes a token.
    assert kept(4, gradient_checkpointing=True).per_token - kept(3, gradient_checkpointing=True).per_token == 16 * 8
    assert kept(4).per_token - kept(3).per_token > 10 * 16 * 8


def test_what_is_kept_grows_with_tokens_and_by_what_the_products_type_weighs() -> None:
    assert KeptForBackward(fixed=100, per_token=7).bytes_for(10) == 170
    actor = tiny_actor(torch.float32)
    half = Actor(actor.model, compute=ComputeSection(autocast="bfloat16"))
    matrices = [weight for weight in actor.model.parameters() if weight.ndim == 2]
    copies = 2 * sum(weight.numel() for weight in matrices)
    # Less what the head keeps of one token: the first is not predicted.
    assert kept_for_backward(half).fixed == pytest.approx(copies, rel=0.05)
    assert kept_for_backward(actor).fixed == pytest.approx(0, abs=0.05 * copies)


@pytest.mark.parametrize(("to_come", "suffices"), [(5_500, True), (5_501, False)])
def test_passes_and_what_is_to_come_fit_into_nine_tenths_of_what_is_free(to_come: int, suffices: bool) -> None:
    # 500 + 1,000 x 3 = 3,500, and 0.9 x 10,000 = 9,000.
    assert fits(KeptForBackward(500, 3), tokens=1000, to_come=to_come, free=10_000) == suffices


def test_an_optimizer_says_what_its_gradients_and_means_will_take() -> None:
    model = torch.nn.Linear(3, 2)  # 8 numbers
    optimizer = WeightOptimizer(model, OptimizerSection())
    assert optimizer.bytes_to_come() == 8 * 12
    torch.autograd.backward(model(torch.ones(1, 3)).sum())
    optimizer.step(1.0)
    assert optimizer.bytes_to_come() == 8 * 4


def test_a_cpu_keeps_activations_and_says_nothing() -> None:
    actor = tiny_actor()
    assert actor.compute.gradient_checkpointing == "auto"
    result = trainer(actor, run_config()).update(ragged(), iteration=1)
    assert (result.note, actor.passes.recomputes, "actor/peak_memory_gb" in result.metrics) == (None, False, False)


def test_an_update_that_runs_out_of_memory_says_what_helps() -> None:
    actor = tiny_actor()

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    actor.model.model.layers[1].register_forward_hook(full)
    with pytest.raises(UserError, match=r"^batch\.micro_batch_tokens must leave a pass room .* 1536 and Out.*2\.00"):
        trainer(actor, run_config()).update(ragged(), iteration=1)


@pytest.mark.parametrize("gpu", [pytest.param("cuda", marks=ON_GPU)])
def test_a_gpu_makes_activations_again_where_they_would_not_fit_and_says_so_once(gpu: str) -> None:
    for tokens, recomputes in ((64, False), (10**12, True)):
        actor = Actor(tiny_actor(torch.float32).model.to(gpu))
        note = choose_checkpointing(actor, run_config(batch={"micro_batch_tokens": tokens}), to_come=0)
        assert note is not None
        assert ("made again in backward" in note, actor.passes.recomputes) == (recomputes, recomputes)
    learner = trainer(Actor(tiny_actor(torch.float32).model.to(gpu), packs=None), run_config())
    first, second = (learner.update(ragged(), iteration=iteration) for iteration in (1, 2))
    assert first.note is not None and second.note is None
    assert second.metrics["actor/peak_memory_gb"] > 0
