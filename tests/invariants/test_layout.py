"""Padded rows and packed ones, whole logits and chunks of them, in passes of any size: the same numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2ForCausalLM

from agentloop.errors import UserError
from agentloop.learning.batch import build_batch
from agentloop.learning.passes import score
from agentloop.models.actor import Actor
from agentloop.models.critic import Critic
from agentloop.training.train import train
from tests.fakes.batch_rows import AUTHORS, ragged
from tests.fakes.runs import SilentDisplay, save_qwen2, small_config
from tests.fakes.tiny_actors import LOSS, gradients, rescore, run_config, tiny_actor

TOLERANCES = [(torch.float64, 1e-10), (torch.float32, 1e-5)]
PLAIN, CHUNKED = 10**9, 0
"""Most bytes of logits that are made at once."""
WAYS = {
    "padded": (False, PLAIN),
    "packed": (True, PLAIN),
    "chunked": (False, CHUNKED),
    "packed and chunked": (True, CHUNKED),
}
LOSSES = [{"fresh": {"objective": "gspo"}, "entropy_coef": 0.01}, {**LOSS, "entropy_coef": 0.01}]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentloop.models.token_log_probs.chunked.CPU_CHUNKS", (16, 10))


def actor_with(model: PreTrainedModel, way: str, monkeypatch: pytest.MonkeyPatch) -> Actor:
    packs, most = WAYS[way]
    monkeypatch.setattr("agentloop.models.token_log_probs.head._PLAIN_BYTES", most)
    return Actor(model, packs=packs)


def assert_close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_every_way_has_log_probs_and_entropies_of_one_pass(
    dtype: torch.dtype, tolerance: float, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, batch = tiny_actor(dtype), build_batch(ragged(), AUTHORS)
    wanted = score(plain, batch, max_tokens=10**6)
    actor = actor_with(plain.model, way, monkeypatch)
    for tokens in (1, 40, 10**6):
        found = score(actor, batch, max_tokens=tokens)
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other, tolerance)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_every_way_has_the_same_gradient(
    dtype: torch.dtype, tolerance: float, way: str, loss: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tiny_actor(dtype)
    scored = rescore(plain, ragged(), old=tiny_actor(dtype, seed=1))
    wanted_loss, wanted, _ = gradients(plain, scored, run_config(loss=loss))
    actor = actor_with(plain.model, way, monkeypatch)
    for tokens in (1, 30, 10**6):
        config = run_config(loss=loss, batch={"micro_batch_tokens": tokens})
        found, gradient, _ = gradients(actor, scored, config)
        assert_close(gradient, wanted, tolerance)
        assert found == pytest.approx(wanted_loss, rel=max(tolerance, 1e-6))


def test_packed_rows_have_the_values_of_padded_ones() -> None:
    found, actor = [], tiny_actor(torch.float64)
    for packs in (False, True):
        critic = Critic(Actor(actor.model, packs=packs))
        torch.nn.init.normal_(critic.weights["head"].weight, generator=torch.Generator().manual_seed(3))
        batch = build_batch(ragged(), AUTHORS)
        found.append(critic.values(batch.token_ids, batch.attention_mask, batch.response_mask))
    for one, other in zip(*found, strict=True):
        assert_close(other, one, 1e-10)


def test_model_that_mixes_packed_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_qwen2(tmp_path / "qwen2", layers=2)
    forward = Qwen2ForCausalLM.forward

    def with_positions_of_its_own(self: Any, *, position_ids: Any = None, **inputs: Any) -> Any:
        return forward(self, **inputs)

    monkeypatch.setattr(Qwen2ForCausalLM, "forward", with_positions_of_its_own)
    config = small_config(tmp_path, model, batch={"layout": "packed"})
    with pytest.raises(UserError, match=r"^model\.path must give the same log-probs .*, or batch\.layout: padded\."):
        train(config, display=SilentDisplay())
