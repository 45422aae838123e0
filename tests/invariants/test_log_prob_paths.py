"""Log-probs from whole logits and from chunks: the same numbers, whatever the layout and the micro-batches."""

from __future__ import annotations

import pytest
import torch

from agentloop.config.sections.model import ComputeSection
from agentloop.learning.batch import build_batch, score
from agentloop.models.actor import Actor
from tests.fakes.batch_rows import AUTHORS, LOSS, gradients, mixed_rows, run_config, scored_rows, tiny_actor
from tests.invariants.test_layout import TOLERANCES, assert_close

CHUNKED = ComputeSection(log_probs="chunked")


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_chunks_have_the_log_probs_and_gradient_of_whole_logits(
    dtype: torch.dtype, tolerance: float, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentloop.models.token_log_probs.chunked.CPU_CHUNKS", (16, 10))
    plain = tiny_actor(dtype)
    chunked = Actor(plain.model, packs=packs, compute=CHUNKED)
    batch = build_batch(mixed_rows(), AUTHORS)
    for one, other in zip(score(chunked, batch, max_tokens=40), score(plain, batch, max_tokens=10**6), strict=True):
        assert_close(one, other, tolerance)
    settings = {**LOSS, "entropy_coef": 0.01}
    scored = scored_rows(plain, mixed_rows(), old=tiny_actor(dtype, seed=1))
    loss, gradient, _ = gradients(plain, scored, run_config(loss=settings))
    for tokens in (1, 40, 10**6):
        found, other, _ = gradients(chunked, scored, run_config(loss=settings, batch={"micro_batch_tokens": tokens}))
        assert_close(other, gradient, tolerance)
        assert found == pytest.approx(loss, rel=max(tolerance, 1e-6))
