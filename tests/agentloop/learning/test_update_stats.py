"""What an update counts of its ratios and its drift."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import torch

from agentloop.learning.batch import build_batch
from agentloop.learning.update_stats import UpdateResult, binned, histograms
from replay.records import BatchRow
from replay.storage.format.ratio_histograms import BINS, Counts, bounds, count, merged, quantile_bounds
from tests.fakes.batch_rows import (
    AUTHORS,
    LOSS,
    batch_row,
    mixed_rows,
    row,
    run_config,
    segment,
    tiny_actor,
    trainer,
)

AGES = {None: "unknown", 0: "0", 3: "2-3", 2: "2-3"}
STALENESS = [0, 3, None]


def aged_rows() -> list[BatchRow]:
    """Of the three replayed rows each has another age, and one fresh row has no known log-prob for a token."""
    rows = mixed_rows()
    aged = [
        batch_row(item.trajectory, "replay", staleness=stale, advantage=item.advantage)
        for item, stale in zip(rows[6:], STALENESS, strict=True)
    ]
    return [*rows[:6], *aged, row("x", segment("uuxxll"), group="g9")]


def updated() -> tuple[UpdateResult, list[BatchRow]]:
    config = run_config(loss=LOSS, batch={"mini_batch": 5, "ppo_epochs": 2}, optimizer={"learning_rate": 0.02})
    learner = trainer(tiny_actor(torch.float64), config)
    learner.update(aged_rows(), iteration=1)
    return learner.update(aged_rows(), iteration=2), aged_rows()


def of(found: UpdateResult, quantity: str, stream: str) -> np.ndarray:
    return merged(each.counts for each in found.histograms if (each.quantity, each.stream) == (quantity, stream))


def test_histograms_count_every_token_there_was_a_measurement_of() -> None:
    result, rows = updated()
    batch = build_batch(rows, AUTHORS)
    known = batch.response_mask & ~batch.behavior_log_probs.isnan()
    assert int((batch.response_mask & ~known).sum()) == 2  # of the demonstration
    counted = Counter({(each.quantity, each.stream, each.age): int(each.counts.sum()) for each in result.histograms})
    of_trajectory = torch.zeros(len(rows), dtype=torch.int64).index_add_(0, batch.trajectory, known.sum(dim=1))
    for position, item in enumerate(rows):
        stream, age = item.stream, AGES[item.staleness] if item.stream == "replay" else ""
        counted["drift", stream, age] -= int(of_trajectory[position])
        # In each of two passes, where the row has a gradient: those of advantage 0 have none.
        trained = int(batch.loss_mask[batch.trajectory == position].sum())
        counted["ratio", stream, age] -= 2 * trained * (item.advantage != 0)
    assert set(counted.values()) == {0}
    assert {age for _, stream, age in counted if stream == "replay"} == {"0", "2-3", "unknown"}


def mean_of_edges(counts: Counts, side: int) -> float:
    """As if every token had the value of its bin's lower edge (side 0) or upper one."""
    edges = np.exp([bounds(place)[side] for place in range(BINS)])
    there = counts > 0
    return float(counts[there] @ edges[there] / counts.sum())


def test_histograms_hold_the_exact_quantiles_and_means_between_their_edges() -> None:
    result, _ = updated()
    for quantity in ("ratio", "drift"):
        for stream in ("fresh", "replay"):
            counts, metrics = of(result, quantity, stream), result.metrics
            lower, upper = (mean_of_edges(counts, side) for side in (0, 1))
            assert lower <= metrics[f"actor/{stream}/{quantity}_mean"] <= upper
            for percent in (1, 50, 99):
                within = quantile_bounds(counts, percent / 100)
                assert within is not None
                assert within[0] <= metrics[f"actor/{stream}/{quantity}_p{percent:02d}"] <= within[1]
    # The weights have moved: tokens are not all in one bin.
    assert np.count_nonzero(of(result, "ratio", "fresh")) > 3


def test_observed_rows_have_drift_and_no_ratio() -> None:
    rows = [row("o", segment("uudddd"), stream="replay"), row("p", segment("uull"), stream="replay")]
    found = trainer(tiny_actor(torch.float64), run_config()).score_only(rows).histograms
    assert [(each.quantity, each.stream, each.age, each.counts.sum()) for each in found] == [
        ("drift", "replay", "unknown", 6)
    ]


def test_what_was_not_measured_is_absent() -> None:
    # A demonstration has no behavior log-probs, and an advantage of 0 no gradient pass.
    rows = [row("x", segment("uuxxx"), advantage=0.0), row("y", segment("uull"), stream="replay")]
    found = trainer(tiny_actor(torch.float64), run_config()).update(rows, iteration=1).histograms
    assert {(each.quantity, each.stream) for each in found} == {("ratio", "replay"), ("drift", "replay")}


def test_logs_are_binned_as_numpy_does_it_by_trajectory_and_without_nan() -> None:
    logs = torch.tensor([[0.005, -0.005, 1.125, math.nan], [-0.3, 30.0, 0.0, -30.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, True], [True, True, False, True]])
    spread = binned(logs, mask, torch.tensor([1, 0]), count=3)
    assert spread.shape == (3, BINS)
    expected = [count([-0.3, 30.0, -30.0]), count([0.005, -0.005, 1.125]), count([])]
    assert np.array_equal(spread.numpy(), np.stack(expected))
    kept = histograms("drift", spread, [None, "1", "2-3"])
    assert [(each.stream, each.age, each.counts.sum()) for each in kept] == [("fresh", "", 3), ("replay", "1", 3)]
