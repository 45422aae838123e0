"""A GPU learns what a CPU learns."""

import copy
from pathlib import Path

import pytest
import torch

from agentloop.config.sections.model import ComputeSection
from agentloop.learning.batch import build_batch
from agentloop.learning.passes import score
from agentloop.models.actor import Actor
from agentloop.training.train import train
from tests.fakes.batch_rows import AUTHORS, ragged
from tests.fakes.runs import SilentDisplay, save_qwen2, small_config
from tests.fakes.tiny_actors import gradients, rescore, run_config, tiny_actor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
TOLERANCE = 1e-4
EXACT = ComputeSection(autocast="none")


@pytest.mark.parametrize("objective", ["ppo_clip", "gspo", "cispo", "gmpo", "topr"])
@pytest.mark.parametrize("packs", [False, True])
def test_scores_and_gradient_of_a_gpu_are_those_of_a_cpu(objective: str, packs: bool) -> None:
    models = tiny_actor(torch.float32).model, tiny_actor(torch.float32, seed=1).model
    config = run_config(loss={"fresh": {"objective": objective}, "replay": {"objective": objective}})
    found = []
    for device in ("cpu", "cuda"):
        actor, old = (Actor(copy.deepcopy(model).to(device), packs=packs, compute=EXACT) for model in models)
        log_probs, entropies = score(actor, build_batch(ragged(), AUTHORS).to(actor.device), max_tokens=60)
        loss, gradient, _ = gradients(actor, rescore(actor, ragged(), old=old), config)
        found.append([part.cpu() for part in (log_probs, entropies, torch.tensor(loss), gradient)])
    for one, other in zip(*found, strict=True):
        assert (other - one).abs().max() <= TOLERANCE * one.abs().max()


def test_a_gpu_multiplies_float32_weights_in_bfloat16_by_default() -> None:
    model = copy.deepcopy(tiny_actor(torch.float32).model).to("cuda")
    assert Actor(model).compute.autocast == "bfloat16"
    assert Actor(model, compute=EXACT).compute.autocast == "none"
    assert Actor(model.to(torch.bfloat16)).compute.autocast == "none"


def test_run_scores_as_it_samples(tmp_path: Path) -> None:
    display = SilentDisplay()
    train(small_config(tmp_path, save_qwen2(tmp_path / "qwen2")), display=display)
    for metrics in display.iterations:
        assert metrics["actor/fresh/drift_mean"] == pytest.approx(1.0, abs=0.05)
