"""Every objective and correction: how rows are cut, ordered and split into segments changes nothing."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentloop.algorithms.catalog import OBJECTIVES
from agentloop.config import RunConfig
from agentloop.learning.batch import ScoredBatch
from agentloop.learning.passes import corrected
from agentloop.models.actor import Actor
from context.tokens.token_sequence import Segment, TokenSequence
from replay.records import BatchRow
from tests.fakes.batch_rows import AUTHORS, ragged, row, segment
from tests.fakes.tiny_actors import gradients, rescore, run_config, tiny_actor

WIDE = {"gspo": {"clip_low": 0.9, "clip_high": 9.0}, "gmpo": {"log_ratio_low": 3.0, "log_ratio_high": 3.0}}
"""Old and new weights of these tests are far apart: the usual bounds would clip everything."""
OWN = """
def spread(inputs, *, power):
    ratios = inputs.trajectory_mean(inputs.log_ratios).exp()
    return -inputs.advantages * ratios**power
"""
CORRECTIONS: list[dict[str, Any]] = [
    {"kind": kind, "level": level, "mean": mean, **bounds}
    for kind, bounds in (
        ("truncate", {"ratio_high": 2.0}),
        ("mask", {"ratio_low": 0.2, "ratio_high": 5.0}),
        ("rejection", {"ratio_low": 0.2}),
    )
    for level, mean in (("token", "product"), ("turn", "product"), ("sequence", "geometric"))
]


def streams(name: str, tmp_path: Path) -> dict[str, Any]:
    """Of one objective for both streams, with rows of unknown log-probs among them."""
    if name == "own":
        (tmp_path / "own.py").write_text(OWN)
        part: dict[str, Any] = {"objective": {"name": f"{tmp_path / 'own.py'}:spread", "options": {"power": 0.5}}}
    else:
        part = {"objective": {"name": name, **WIDE.get(name, {})}}
    fresh = {**part, "anchor": "behavior" if name == "exgrpo" else "old", "missing_log_probs": "luffy"}
    return {"fresh": fresh, "replay": {**part, "missing_log_probs": "recompute"}}


def rows_to_learn() -> list[BatchRow]:
    demonstrated = [
        row("x0", segment("uuxle", seed=90), segment("ullel", seed=91), advantage=0.7),
        row("x1", segment("uxxel", seed=92), advantage=-0.6, stream="replay", group="old"),
    ]
    return [*ragged(), *demonstrated]


def split(trajectory: BatchRow) -> BatchRow:
    """The same tokens after the same tokens: a segment for the last turn, with all before it shown again."""

    def halves(whole: Segment) -> list[Segment]:
        tokens = whole.tokens
        action = AUTHORS.is_action(tokens.authors)
        middle = int(np.flatnonzero(action[1:] & ~action[:-1])[-1]) + 1
        begun = TokenSequence(*(part[:middle] for part in _arrays(tokens)))
        authors, behavior, versions = (part.copy() for part in _arrays(tokens)[1:])
        authors[:middle], behavior[:middle], versions[:middle] = AUTHORS.code("history"), np.nan, -1
        return [Segment(begun), Segment(TokenSequence(tokens.token_ids, authors, behavior, versions))]

    segments = [half for whole in trajectory.trajectory.segments for half in halves(whole)]
    return replace(trajectory, trajectory=replace(trajectory.trajectory, segments=tuple(segments)))


def _arrays(tokens: TokenSequence) -> tuple[Any, ...]:
    return tokens.token_ids, tokens.authors, tokens.behavior_log_probs, tokens.policy_versions


@cache
def actor_of(seed: int, dtype: torch.dtype = torch.float64) -> Actor:
    """What models do with passes, order and segments is the matter of test_layout: one layer is enough here."""
    return tiny_actor(dtype, seed=seed, num_hidden_layers=1)


def learned(
    rows: list[BatchRow], config: RunConfig, dtype: torch.dtype = torch.float64
) -> tuple[float, Tensor, dict[str, float]]:
    actor, old = actor_of(0, dtype), actor_of(3, dtype)
    scored: ScoredBatch
    ref = actor_of(2, dtype) if config.kl.loss_coef > 0 else None
    scored, metrics = corrected(rescore(actor, rows, old=old, ref=ref), config.loss.parts())
    loss, gradient, totals = gradients(actor, scored, config)
    return loss, gradient, metrics | totals.metrics()


def check_variants(dtype: torch.dtype = torch.float64, **sections: Any) -> RunConfig:
    """However rows are cut into passes, ordered or split into segments, the update is the same."""
    config, rows = run_config(**sections), rows_to_learn()
    order = np.random.default_rng(0).permutation(len(rows))
    variants = [(rows, run_config(**sections, batch={"micro_batch_tokens": most})) for most in (1, 30)]
    variants += [([rows[i] for i in order], config), ([split(item) for item in rows], config)]
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    loss, gradient, metrics = learned(rows, config, dtype)
    assert bool(gradient.isfinite().all())
    assert float(gradient.abs().max()) > 1e-4
    for changed_rows, changed in variants:
        other_loss, other, other_metrics = learned(changed_rows, changed, dtype)
        assert float((other - gradient).abs().max()) <= tolerance * float(gradient.abs().max())
        assert other_loss == pytest.approx(loss, rel=10 * tolerance)
        assert other_metrics == pytest.approx(metrics, rel=10 * tolerance, abs=1e-12)
    return config


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", [*OBJECTIVES, "own"])
def test_objective_is_the_same_in_any_passes_order_or_segments(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    check_variants(dtype, loss={**streams(name, tmp_path), "aggregation": "seq-mean-token-mean"})


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: f"{c['kind']}-{c['level']}")
def test_correction_does_not_depend_on_passes_row_order_or_segments(correction: dict[str, Any]) -> None:
    stream = {"anchor": "old", "missing_log_probs": "recompute", "correction": correction}
    check_variants(loss={"fresh": stream, "replay": stream})


@pytest.mark.parametrize(("kind", "gradient"), [("k3", "plain"), ("k1", "importance")])
@pytest.mark.parametrize("name", ["ppo_clip", "gspo"])
def test_regularised_loss_is_one_however_it_is_cut(name: str, kind: str, gradient: str, tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "loss": {**streams(name, tmp_path), "aggregation": "seq-mean-token-mean", "entropy_coef": 0.02},
        "kl": {"loss_coef": 0.1, "loss_estimator": kind, "loss_gradient": gradient},
    }
    whole = learned(rows_to_learn(), check_variants(**sections))[0]
    for part, weaker in (("kl", {"loss_coef": 0.0}), ("loss", {"entropy_coef": 0.0})):
        without = run_config(**{**sections, part: {**sections[part], **weaker}})
        assert learned(rows_to_learn(), without)[0] != pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("name", [*OBJECTIVES, "own"])
def test_metrics_of_one_stream_do_not_move_when_the_other_changes(name: str, tmp_path: Path) -> None:
    rows = rows_to_learn()
    loss = streams(name, tmp_path)
    before = learned(rows, run_config(loss=loss))[2]
    other = {"objective": "cispo", "anchor": "old", "correction": {"kind": "mask", "ratio_high": 1.1}}
    changed = {"fresh": loss["fresh"], "replay": {**other, "missing_log_probs": "bc"}}
    moved = [replace(item, advantage=3 * item.advantage - 1) if item.stream == "replay" else item for item in rows]
    after = learned([*moved, row("new", segment("ulllell", seed=8), stream="replay")], run_config(loss=changed))[2]
    of_fresh = {key for key in before if key.startswith("actor/fresh/")}
    assert len(of_fresh) >= 8
    assert {key: after[key] for key in of_fresh} == pytest.approx({key: before[key] for key in of_fresh}, rel=1e-12)
    assert {key: after[key] for key in before if key not in of_fresh} != pytest.approx(before, rel=1e-3)


def test_all_fresh_batch_is_plain_ppo_whatever_the_replay_stream_is_told() -> None:
    rows = ragged(replayed=0)
    plain = learned(rows, run_config())
    replay = {"objective": "gspo", "anchor": "old", "correction": {"kind": "truncate", "ratio_high": 1.0}}
    other = learned(rows, run_config(loss={"replay": {**replay, "missing_log_probs": "luffy"}}))
    assert plain[0] == other[0]
    assert torch.equal(plain[1], other[1])
    assert plain[2] == other[2]
