"""One optimizer step that is computed and not made: by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from agentloop.analysis.whatif.losses import WhatIfLoss
from agentloop.analysis.whatif.measure import Ready, effect_of, made_ready, part_data
from agentloop.analysis.whatif.result import AskedObjective, Effect, WhatIf, as_text
from agentloop.errors import UserError
from agentloop.learning.gradients import corrected, stream_losses
from agentloop.learning.update_stats import drift_of
from replay.records import BatchRow
from tests.fakes.batch_rows import (
    gradients,
    row,
    run_config,
    sampled_by,
    scored_rows,
    segment,
    tiny_actor,
    weights_of,
)

RATIOS = (1.5, 0.5, 1.1)
ADVANTAGES = (1.0, -1.0, 1.0)


def three_tokens(actor: Any) -> list[BatchRow]:
    """Three replayed rows of one trained token each, which is now RATIOS times as likely as when it was sampled."""
    items = [
        row(f"t{index}", segment("uul", [-1.0], seed=index), advantage=advantage, stream="replay")
        for index, advantage in enumerate(ADVANTAGES)
    ]
    known = sampled_by(actor, items)
    return [
        row(
            item.trajectory.id,
            segment("uul", [float(item.trajectory.segments[0].tokens.behavior_log_probs[2]) - math.log(ratio)], seed=i),
            advantage=item.advantage,
            stream="replay",
        )
        for i, (item, ratio) in enumerate(zip(known, RATIOS, strict=True))
    ]


def ready(actor: Any, rows: list[BatchRow], objective: str, **options: Any) -> Ready:
    stream = {"objective": {"name": objective, **options}}
    config = run_config(loss={"replay": stream})
    scored = scored_rows(actor, rows, old=actor)
    return Ready(WhatIfLoss(objective, config), stream_losses(config.loss), corrected(scored, config.loss)[0])


def effects_of(actor: Any, objectives: list[Ready], bucket: str, members: torch.Tensor) -> list[Effect]:
    return [effect_of(actor, one, bucket, members) for one in objectives]


def test_clipping_loss_and_gradient_are_those_of_the_tokens() -> None:
    actor = tiny_actor()
    rows = three_tokens(actor)
    before = weights_of(actor)
    both = [ready(actor, rows, "ppo_clip"), ready(actor, rows, "surrogate")]
    clip, free = effects_of(actor, both, "all", torch.arange(3))
    # Replay's bounds are 0.8 and 1.2: 1.5 of A = 1 is clipped above, 0.5 of A = -1 below, 1.1 is within.
    assert (clip.clipped, clip.clipped_above, clip.clipped_below) == pytest.approx((2 / 3, 1 / 3, 1 / 3))
    assert free.clipped == 0.0
    # -1.2 and 0.8 and -1.1, over three tokens; and without bounds -1.5, 0.5 and -1.1.
    assert clip.loss == pytest.approx((-1.2 + 0.8 - 1.1) / 3, abs=1e-6)
    assert free.loss == pytest.approx((-1.5 + 0.5 - 1.1) / 3, abs=1e-6)
    # Quantile q of three values is the one of rank ceil(3 q).
    assert (clip.ratio_p01, clip.ratio_p50, clip.ratio_p99) == pytest.approx((0.5, 1.1, 1.5), rel=1e-5)
    above = effects_of(actor, both, "x", torch.tensor([0]))[0]
    assert (above.clipped_above, above.clipped_below) == (1.0, 0.0)
    # What is not clipped is the third token's: a third of its gradient alone.
    alone = effects_of(actor, both, "x", torch.tensor([2]))
    assert alone[0].gradient_norm == pytest.approx(3 * clip.gradient_norm, rel=1e-6)
    # A failure that has become half as likely: the clip leaves it alone. The norm is that of all parameters together.
    assert effects_of(actor, both, "1", torch.tensor([1]))[0].gradient_norm == 0.0
    vector = gradients(actor, both[1].scored, both[1].loss.config)[1]
    assert free.gradient_norm == pytest.approx(float(vector.norm()))
    actor.model.zero_grad(set_to_none=True)
    effects_of(actor, both, "all", torch.arange(3))
    assert weights_of(actor).equal(before)
    assert all(parameter.grad is None for parameter in actor.model.parameters())


def test_data_of_a_part_are_those_of_its_rows_alone() -> None:
    actor = tiny_actor()
    rows = three_tokens(actor)
    scored = scored_rows(actor, rows, old=actor)
    part = part_data("2-3", drift_of(scored), torch.tensor([0, 1]), torch.ones(3), ess_weights="mean")
    assert (part.trajectories, part.tokens, part.unknown) == (2, 2, 0)
    assert (part.drift_mean, part.token_gap_max) == pytest.approx((1.0, -math.log(0.5)), rel=1e-5)  # (1.5 + 0.5) / 2
    assert part.ess == pytest.approx(2.0**2 / (2 * (1.5**2 + 0.5**2)), rel=1e-5)
    unknown = [row("u", segment("uux"), stream="replay")]
    of_unknown = drift_of(scored_rows(actor, unknown, old=actor))
    nothing = part_data("unknown", of_unknown, torch.tensor([0]), torch.ones(1), ess_weights="mean")
    assert (nothing.unknown, nothing.drift_mean, nothing.ess) == (1, None, None)


def test_rows_that_an_objective_can_not_be_trained_on_are_refused_by_its_name() -> None:
    actor = tiny_actor()
    scored = scored_rows(actor, [row("t", segment("uux"), stream="replay")], old=actor)
    made_ready(WhatIfLoss("own", run_config(loss={"replay": {"objective": "bc"}})), scored)
    with pytest.raises(UserError, match="ppo_clip: behavior_log_probs of trajectory t must be known"):
        made_ready(WhatIfLoss("ppo_clip", run_config()), scored)


def test_number_that_is_not_finite_is_null_in_json_and_seen_in_text() -> None:
    actor = tiny_actor()
    rows = three_tokens(actor)
    effect = effect_of(actor, ready(actor, rows, "surrogate"), "all", torch.arange(3))
    drift = drift_of(scored_rows(actor, rows, old=actor))
    part = part_data("all", drift, torch.arange(3), torch.ones(3), ess_weights="mean")
    broken = type(effect)(**{**vars(effect), "gradient_norm": math.nan, "ratio_p01": None})
    found = WhatIf(
        "r", 1, "w", "rows", "known", 3, (AskedObjective("surrogate", "a", "b"),), (part,), (broken,), {}, ()
    )
    assert found.to_json()["effects"][0]["gradient_norm"] is None
    line = next(line for line in as_text(found).splitlines() if "surrogate" in line and "all" in line)
    assert line.split()[-1] == "nan" and " - " in line
