"""The numbers of docs/reading-a-run.md and docs/worked-example.md are what the project's own functions give."""

import math
import re
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from agentloop.algorithms.corrections import Correction, CorrectionKind, correct
from agentloop.algorithms.heterogeneous import Anchor, StreamLoss, anchor_log_probs, heterogeneous_loss
from agentloop.algorithms.kl import kl_estimate
from agentloop.algorithms.log_probs import log_ratios
from agentloop.algorithms.objective_input import ObjectiveInput
from agentloop.algorithms.objectives.surrogate import surrogate
from agentloop.config.sections.loss import LossSection
from agentloop.learning.stream_losses import stream_losses
from agentloop.learning.update_stats import trajectory_drift
from agentloop.runs.display import with_interval
from docs.worked_example import hand, page
from tests.docs.blocks import ROOT, table

PAGE = ROOT / "docs" / "reading-a-run.md"
TOKEN = torch.tensor([[True]])


def numbers(cell: str) -> list[float]:
    return [float(word) for word in cell.split(",")]


def log_probs() -> dict[str, torch.Tensor]:
    """Of the page's one token, by policy; [1, 1] float64."""
    (line,) = re.findall(r"One replayed token, with log-probs (.+):", PAGE.read_text(encoding="utf-8"))
    given = dict(part.split() for part in line.split(", "))
    return {name: torch.tensor([[float(value)]], dtype=torch.float64) for name, value in given.items()}


def test_quantities_of_the_page_are_those_of_its_token() -> None:
    token = log_probs()
    old, behavior, current, reference = (token[name] for name in ("old", "behavior", "current", "reference"))
    anchors = {
        name: anchor_log_probs(old, behavior, [(torch.tensor([True]), StreamLoss(surrogate, name))])
        for name in get_args(Anchor)
    }
    zero = torch.tensor([0])
    expected = {
        "drift": trajectory_drift(old, behavior, response_mask=TOKEN, trajectory=zero, count=1).sum,
        "ratio, anchor `old`": log_ratios(current, anchors["old"], TOKEN).exp(),
        "ratio, anchor `behavior`": log_ratios(current, anchors["behavior"], TOKEN).exp(),
        "KL to the reference, `k1`": kl_estimate(current, reference, TOKEN, "k1"),
        "KL to the reference, `k3`": kl_estimate(current, reference, TOKEN, "k3"),
    }
    shown = {row["quantity"]: row["value"] for row in table(PAGE, "quantity")}
    assert shown == {name: f"{value.item():.3f}" for name, value in expected.items()}


def weights(old: torch.Tensor, behavior: torch.Tensor, kind: CorrectionKind, **changes: Any) -> torch.Tensor:
    mask = torch.ones_like(old, dtype=torch.bool)
    how = Correction(kind, **changes)
    return correct(old, behavior, response_mask=mask, trajectory=torch.tensor([0]), correction=how).weights


def trained(advantage: float, importance: torch.Tensor | None, replay: StreamLoss) -> tuple[float, float]:
    """Loss and gradient of the page's token."""
    token, kinds = log_probs(), [(torch.tensor([True]), replay)]
    current = token["current"].requires_grad_()
    inputs = ObjectiveInput(
        log_probs=current,
        anchors=anchor_log_probs(token["old"], token["behavior"], kinds),
        behavior_log_probs=token["behavior"],
        advantages=torch.tensor([[advantage]]),
        loss_mask=TOKEN,
        trajectory=torch.tensor([0]),
        num_trajectories=1,
        signal_share=torch.ones(1),
    )
    result = heterogeneous_loss(inputs, kinds, importance_weights=importance)
    (gradient,) = torch.autograd.grad(result.loss.sum(), current)
    return result.loss.item(), gradient.item()


def test_losses_of_the_page_are_those_of_the_default_replay_stream() -> None:
    token, replay = log_probs(), stream_losses(LossSection())["replay"]
    rows = table(PAGE, "gradient")
    assert len(rows) == 6
    for row in rows:
        importance = None
        if row["correction"] != "`none`":
            bound = float(row["correction"].removeprefix("`truncate` at "))
            importance = weights(token["old"], token["behavior"], "truncate", ratio_high=bound)
        anchored = replace(replay, anchor=row["anchor"].strip("`"))
        loss, gradient = trained(float(row["advantage"]), importance, anchored)
        assert (row["loss"], row["gradient"]) == (f"{loss:.3f}", f"{abs(gradient) and gradient:.3f}")


def test_sample_sizes_of_the_page_are_those_of_their_drifts() -> None:
    for row in table(PAGE, "ESS"):
        logs = torch.tensor(numbers(row["log drift of four tokens"]), dtype=torch.float64)[:, None]
        mask, rows = torch.ones(4, 1, dtype=torch.bool), torch.arange(4)
        drift = trajectory_drift(logs - 1.0, torch.full_like(logs, -1.0), response_mask=mask, trajectory=rows, count=4)
        assert numbers(row["weights"]) == pytest.approx(drift.weight.tolist(), abs=0.005)
        assert row["ESS"] == f"{drift.effective_sample_size(rows):.2f}"


def test_products_of_the_page_grow_with_length_and_means_do_not() -> None:
    for row in table(PAGE, "tokens"):
        old = torch.full((1, int(row["tokens"])), -1.0, dtype=torch.float64)
        for mean in ("product", "geometric"):
            found = weights(old, old - 0.01, "truncate", level="sequence", mean=mean, ratio_high=math.inf)
            assert row[f"`mean: {mean}`"] == f"{found[0, 0].item():.2f}"


def test_held_out_tasks_of_the_page_find_differences_of_that_size() -> None:
    """Two proportions near p = 1/2: d^2 = 2 (1.960 + 0.842)^2 p (1 - p) / n."""
    for row in table(PAGE, "points found"):
        count = int(row["held-out tasks"])
        assert with_interval(0.5, count) == f"50.0 % ({row['interval of 50 %']})"
        assert round(100 * math.sqrt(2 * (1.960 + 0.842) ** 2 / 4 / count)) == int(row["points found"])


def test_worked_example_is_what_the_modules_compute_today() -> None:
    """Else: `python -m docs.worked_example > docs/worked-example.md`, and read what has changed."""
    assert page() == (ROOT / "docs" / "worked-example.md").read_text(encoding="utf-8")


def test_arithmetic_that_the_modules_do_not_find_is_refused() -> None:
    assert hand("1 - 1/2", 0.5) == "1 - 1/2 = 0.5"
    with pytest.raises(ValueError, match="1 - 1/3 must be 0.5, which the modules found, got 0.666"):
        hand("1 - 1/3", 0.5)
