"""AgentEvolver's heterogeneous loss, written from its formula, against the documented configuration."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from agentloop.config import RunConfig
from agentloop.learning.batch import ScoredBatch
from agentloop.learning.passes import corrected
from tests.fakes.batch_rows import ragged
from tests.fakes.tiny_actors import gradients, rescore, run_config, tiny_actor

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def documented(**loss: Any) -> RunConfig:
    """The configuration on the page about algorithms, with more keys of its loss."""
    (block,) = re.findall(r"```yaml\n(context: \{strategy: hint\}\n.*?)```", PAGE.read_text(), re.DOTALL)
    sections = yaml.safe_load(block)
    return run_config(**{**sections, "loss": {**sections["loss"], **loss}})


def rows_of(hinted: str, segments: int = 1) -> ScoredBatch:
    """Six trajectories; which were sampled in sight of a hint (none, all or some), their last segments alone.

    There a trajectory is one row; with two `segments` every second one has two.
    """
    rows = []
    for index, row in enumerate(ragged(fresh=6, replayed=0)):
        *parts, last = row.trajectory.segments[:segments]
        if hinted == "all" or (hinted == "some" and index % 2):
            last = replace(last, behavior_context="hinted")
        rows.append(replace(row, trajectory=replace(row.trajectory, segments=(*parts, last))))
    return rescore(tiny_actor(seed=0), rows, old=tiny_actor(seed=1))


def written(log_probs: Tensor, scored: ScoredBatch, aggregation: str) -> Tensor:
    """e x off + (1 - e) x on, with off and on of one clipped form, as a masked mean."""
    a, m = scored.batch.advantages.double(), scored.batch.loss_mask.double()
    r = torch.exp(torch.where(m > 0, log_probs - scored.old_log_probs, 0.0))

    def clipped(high: float) -> Tensor:
        upper = torch.maximum(-a * r, -a * r.clamp(1 - 0.2, 1 + high))
        return torch.where(a < 0, torch.minimum(upper, -a * 3.0), upper)

    e = scored.batch.hinted.double()[:, None]
    token = e * clipped(0.6) + (1 - e) * clipped(0.28)
    match aggregation:
        case "token-mean":
            return (token * m).sum() / (m.sum() + 1e-8)
        case "seq-mean-token-sum":
            return (token * m).sum(1).mean()
        case "seq-mean-token-mean":
            return ((token * m).sum(1) / m.sum(1)).mean()
    return (token * m).sum() / m.shape[1]


@pytest.mark.parametrize(
    ("aggregation", "hinted", "segments"),
    [
        *((aggregation, hinted, 1) for aggregation in AGGREGATIONS for hinted in ("none", "all", "some")),
        ("token-mean", "some", 2),  # one segment in sight of a hint makes all rows of its trajectory hinted ones
    ],
)
def test_documented_configuration_is_agent_evolvers_loss(aggregation: str, hinted: str, segments: int) -> None:
    actor, scored = tiny_actor(seed=0), rows_of(hinted, segments)
    batch = scored.batch
    length = batch.loss_mask.shape[1] / batch.num_trajectories if aggregation.endswith("norm") else None
    config = documented(aggregation=aggregation, norm_length=length)
    value, gradient, _ = gradients(actor, scored, config)
    actor.model.zero_grad(set_to_none=True)
    log_probs, _ = actor.log_probs(
        batch.token_ids, batch.attention_mask, batch.response_mask, batch.temperature, entropy=False
    )
    expected = written(log_probs, scored, aggregation)
    torch.autograd.backward(expected)
    wanted = torch.cat([p.grad.flatten() for p in actor.model.parameters() if p.grad is not None])
    assert value == pytest.approx(expected.item(), rel=1e-6, abs=1e-9)
    assert float((gradient - wanted).abs().max()) <= 1e-6 * float(wanted.abs().max())
    if hinted != "none":  # the other bounds would be seen
        fresh_bounds = documented(aggregation=aggregation, norm_length=length, hinted=None)
        assert gradients(actor, scored, fresh_bounds)[0] != pytest.approx(value, rel=1e-3)


def test_hinted_rows_are_trained_as_fresh_ones_unless_asked_for() -> None:
    actor = tiny_actor(seed=0)
    plain, hinted = (gradients(actor, rows_of(rows), run_config()) for rows in ("none", "all"))
    assert plain[0] == hinted[0]
    assert torch.equal(plain[1], hinted[1])


def test_hinted_rows_without_an_advantage_are_left_out_only_by_an_objective_that_needs_one() -> None:
    """Cloning (`bc`) learns from them; the same rows under fresh's objective add exactly nothing."""
    scored = rows_of("all")
    flat = replace(scored, batch=replace(scored.batch, advantages=torch.zeros_like(scored.batch.advantages)))
    _, cloned, _ = gradients(tiny_actor(seed=0), flat, documented(hinted={"objective": "bc"}))
    value, clipped, _ = gradients(tiny_actor(seed=0), flat, documented(hinted=None))
    assert float(cloned.abs().max()) > 0
    assert (value, float(clipped.abs().max())) == (0.0, 0.0)


def test_correction_of_hinted_rows_weighs_all_their_segments_and_no_others() -> None:
    """By the ratio old / behavior of the whole trajectory; the other fresh rows have a correction of their own."""
    scored = rows_of("some", 2)
    hinted = {"missing_log_probs": "recompute", "correction": {"kind": "truncate", "level": "sequence"}}
    fresh = {"missing_log_probs": "recompute", "correction": {"kind": "mask", "ratio_high": 1.5}}
    found, metrics = corrected(scored, documented(hinted=hinted, fresh=fresh).loss.parts())
    batch, weights = scored.batch, found.importance_weights
    assert weights is not None and batch.hinted.tolist() == [False, True, True] * 3
    for number in range(6):
        of_it = batch.response_mask & (batch.trajectory == number)[:, None]
        drift = (scored.old_log_probs - batch.behavior_log_probs)[of_it].double()
        if number % 2:
            expected = torch.full_like(drift, min(2.0, math.exp(float(drift.sum()))))
        else:
            expected = drift.exp() * (drift.exp() <= 1.5)
        torch.testing.assert_close(weights[of_it], expected)
    for name, rows in (("hinted", batch.hinted), ("fresh", ~batch.hinted)):
        trained = weights[batch.loss_mask & rows[:, None]]
        assert metrics[f"actor/{name}/importance_weight_mean"] == pytest.approx(float(trained.mean()))
