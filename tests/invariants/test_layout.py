"""Padded rows and packed ones: the same numbers."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from agentloop.errors import UserError
from agentloop.learning.batch import build_batch, score
from agentloop.models.actor import Actor
from agentloop.models.critic import Critic
from agentloop.training.train import train
from tests.fakes.batch_rows import (
    AUTHORS,
    LOSS,
    gradients,
    mixed_rows,
    run_config,
    scored_rows,
    tiny_actor,
    trainer,
    weights_of,
)
from tests.fakes.runs import SilentDisplay, save_qwen2, small_config

TOLERANCES = [(torch.float64, 1e-10), (torch.float32, 1e-5)]


def twins(dtype: torch.dtype, *, seed: int = 0) -> tuple[Actor, Actor]:
    """One model, scored both ways."""
    actor = tiny_actor(dtype, seed=seed)
    return actor, Actor(actor.model, packs=True)


def assert_close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.parametrize("max_tokens", [1, 40, 10**6])
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_packed_rows_have_the_log_probs_and_entropies_of_padded_ones(
    dtype: torch.dtype, tolerance: float, max_tokens: int
) -> None:
    padded, packed = twins(dtype)
    batch = build_batch(mixed_rows(), AUTHORS)
    for one, other in zip(
        score(padded, batch, max_tokens=10**6), score(packed, batch, max_tokens=max_tokens), strict=True
    ):
        assert_close(other, one, tolerance)


@pytest.mark.parametrize("objective", ["ppo_clip", "gspo"])
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_packed_rows_have_the_gradient_of_padded_ones(dtype: torch.dtype, tolerance: float, objective: str) -> None:
    padded, packed = twins(dtype)
    scored = scored_rows(padded, mixed_rows(), old=tiny_actor(dtype, seed=1))
    config = run_config(loss={"fresh": {"objective": objective}, "entropy_coef": 0.01})
    loss, gradient, _ = gradients(padded, scored, config)
    for tokens in (1, 40, 10**6):
        cut = run_config(loss=config.loss.model_dump(exclude_unset=True), batch={"micro_batch_tokens": tokens})
        other_loss, other, _ = gradients(packed, scored, cut)
        assert_close(other, gradient, tolerance)
        assert other_loss == pytest.approx(loss, rel=max(tolerance, 1e-6))


@pytest.mark.parametrize("shared", [False, True])
def test_packed_rows_have_the_values_of_padded_ones(shared: bool) -> None:
    found = []
    for actor in twins(torch.float64):
        critic = Critic(actor, shared=shared)
        torch.nn.init.normal_(critic.weights["head"].weight, generator=torch.Generator().manual_seed(3))
        batch = build_batch(mixed_rows(), AUTHORS)
        found.append(critic.values(batch.token_ids, batch.attention_mask, batch.response_mask))
    for one, other in zip(*found, strict=True):
        assert_close(other, one, 1e-10)


def test_packed_update_moves_the_weights_like_a_padded_one() -> None:
    results = []
    for packs in (False, True):
        actor = tiny_actor(torch.float64)
        actor.packs = packs
        config = run_config(loss=LOSS, batch={"mini_batch": 4, "ppo_epochs": 2, "micro_batch_tokens": 40})
        result = trainer(actor, config).update(mixed_rows(), iteration=1)
        results.append((weights_of(actor), result.metrics))
    (weights, metrics), (other, other_metrics) = results
    assert_close(other, weights, 1e-8)
    assert other_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-9)


def test_packed_run_trains(tmp_path: Path) -> None:
    model = save_qwen2(tmp_path / "qwen2", layers=2)
    settings: dict[str, Any] = {"run": {"iterations": 2}, "batch": {"layout": "packed"}}
    config = small_config(tmp_path, model, **settings)
    display = SilentDisplay()
    train(config, display=display)
    assert [row["actor/fresh/drift_mean"] for row in display.iterations] == pytest.approx([1.0, 1.0], abs=1e-4)


def test_model_that_mixes_packed_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_qwen2(tmp_path / "qwen2", layers=2)
    forward = Qwen2ForCausalLM.forward

    def with_positions_of_its_own(self: Any, *, position_ids: Any = None, **inputs: Any) -> Any:
        return forward(self, **inputs)

    with_positions_of_its_own.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(Qwen2ForCausalLM, "forward", with_positions_of_its_own)
    config = small_config(tmp_path, model, batch={"layout": "packed"})
    with pytest.raises(UserError, match=r"^batch\.layout must be padded"):
        train(config, display=SilentDisplay())
