"""One optimizer step that is computed and not made: by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from agentloop.analysis.whatif.compared_rows import Row
from agentloop.analysis.whatif.losses import WhatIfLoss
from agentloop.analysis.whatif.measure import all_ready
from agentloop.analysis.whatif.present import as_text
from agentloop.analysis.whatif.result import AskedObjective, WhatIf
from agentloop.analysis.whatif.step import Ready, effects_of, part_data
from agentloop.analysis.whatif.tokens import most_clipped
from agentloop.errors import UserError
from agentloop.learning.stream_losses import corrected, stream_losses
from replay.records import BatchRow
from tests.agentloop.training_examples import (
    gradients,
    mixed_rows,
    row,
    run_config,
    sampled_by,
    scored_rows,
    segment,
    tiny_actor,
    weights_of,
)
from tests.context.fakes import family

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
    stream = {"objective": objective, **({objective: options} if options else {})}
    config = run_config(loss={"replay": stream})
    scored = scored_rows(actor, rows, old=actor)
    return Ready(WhatIfLoss(objective, config), stream_losses(config.loss), corrected(scored, config.loss)[0])


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
    # What is not clipped is the third token's: a third of its gradient alone.
    alone = effects_of(actor, both, "x", torch.tensor([2]))
    assert alone[0].gradient_norm == pytest.approx(3 * clip.gradient_norm, rel=1e-6)
    assert alone[0].cosines == pytest.approx({"ppo_clip": 1.0, "surrogate": 1.0})
    assert weights_of(actor).equal(before)
    assert all(parameter.grad is None for parameter in actor.model.parameters())


def test_cosine_says_whether_weights_would_move_the_same_way() -> None:
    actor = tiny_actor()
    rows = three_tokens(actor)
    asked = [ready(actor, rows, name) for name in ("surrogate", "bc", "ppo_clip")]
    surrogate, bc, clip = effects_of(actor, asked, "1", torch.tensor([1]))
    # A failure: the surrogate makes its token rarer, cloning makes it likelier, and the clip leaves it alone.
    assert surrogate.cosines["bc"] == pytest.approx(-1.0)
    assert bc.cosines["surrogate"] == pytest.approx(-1.0)
    assert (clip.gradient_norm, clip.cosines) == (0.0, {"surrogate": None, "bc": None, "ppo_clip": None})
    # And the cosine of the whole is that of the vectors.
    whole = effects_of(actor, asked, "all", torch.arange(3))
    vectors = [gradients(actor, one.scored, one.loss.config)[1] for one in asked[:2]]
    assert whole[0].gradient_norm == pytest.approx(float(vectors[0].norm()))
    expected = torch.nn.functional.cosine_similarity(vectors[0], vectors[1], dim=0)
    assert whole[0].cosines["bc"] == pytest.approx(float(expected))


def test_data_of_a_part_are_those_of_its_rows_alone() -> None:
    actor = tiny_actor()
    rows = three_tokens(actor)
    scored = scored_rows(actor, rows, old=actor)
    part = part_data("2-3", scored.drift(), torch.tensor([0, 1]), torch.ones(3), ess_weights="mean")
    assert (part.trajectories, part.tokens, part.unknown) == (2, 2, 0)
    assert (part.drift_mean, part.drift_max) == pytest.approx((1.0, 1.5), rel=1e-5)  # (1.5 + 0.5) / 2
    assert part.ess == pytest.approx(2.0**2 / (2 * (1.5**2 + 0.5**2)), rel=1e-5)
    unknown = [row("u", segment("uux"), stream="replay")]
    of_unknown = scored_rows(actor, unknown, old=actor).drift()
    nothing = part_data("unknown", of_unknown, torch.tensor([0]), torch.ones(1), ess_weights="mean")
    assert (nothing.unknown, nothing.drift_mean, nothing.ess) == (1, None, None)


def test_clipped_tokens_are_named_by_their_place_in_their_segment() -> None:
    actor = tiny_actor()
    items = mixed_rows(fresh=0, replayed=6)  # every second one has two segments
    asked = ready(actor, items, "ppo_clip")
    trajectories, tokens = most_clipped([asked], [Row(item, "4-7") for item in items], family("chatml").codec, 50)
    stored = {item.trajectory.id: item.trajectory.segments for item in items}
    lines = iter(asked.scored.old_log_probs.tolist())
    scored = {(name, place): next(lines) for name, parts in stored.items() for place in range(len(parts))}
    assert {token.segment for token in tokens} == {0, 1}
    for token in tokens:
        behavior = stored[token.trajectory][token.segment].tokens.behavior_log_probs[token.position]
        current = scored[token.trajectory, token.segment][token.position]
        assert math.log(token.ratio) == pytest.approx(current - float(behavior), rel=1e-4)
        assert (token.ratio > 1.2) if token.advantage > 0 else (token.ratio < 0.8)
    distances = [abs(math.log(token.ratio)) for token in tokens]
    assert distances == sorted(distances, reverse=True)
    # All that clips is among them, and counted by trajectory too.
    (effect,) = effects_of(actor, [asked], "all", torch.arange(6))
    assert effect.clipped == pytest.approx(len(tokens) / effect.trained_tokens)
    assert sum(row.clipped for row in trajectories) == len(tokens)
    shares = [row.clipped / row.trained for row in trajectories]
    assert shares == sorted(shares, reverse=True)


def test_objective_that_nobody_asked_for_is_left_out_where_rows_do_not_fit_it() -> None:
    actor = tiny_actor()
    demonstrated = [row("t", segment("uux"), stream="replay")]
    scored = scored_rows(actor, demonstrated, old=actor)
    cloning = WhatIfLoss("own", run_config(loss={"replay": {"objective": "bc"}}))
    clip = WhatIfLoss("ppo_clip", run_config())
    rows = [Row(item, "0") for item in demonstrated]
    fitting, why = all_ready([cloning, replace(clip, asked=False)], scored, rows)
    assert [one.loss.name for one in fitting] == ["own"]
    assert why[0].startswith("left out: ppo_clip: behavior_log_probs of trajectory t must be known")
    with pytest.raises(UserError, match="ppo_clip: behavior_log_probs of trajectory t must be known"):
        all_ready([cloning, clip], scored, rows)


def test_number_that_is_not_finite_is_null_in_json_and_seen_in_text() -> None:
    actor = tiny_actor()
    rows = three_tokens(actor)
    (effect,) = effects_of(actor, [ready(actor, rows, "surrogate")], "all", torch.arange(3))
    drift = scored_rows(actor, rows, old=actor).drift()
    part = part_data("all", drift, torch.arange(3), torch.ones(3), ess_weights="mean")
    broken = type(effect)(**{**vars(effect), "gradient_norm": math.nan, "ratio_p01": None})
    found = WhatIf(
        "r", 1, "w", "rows", "known", 3, (AskedObjective("surrogate", "a", "b"),), (part,), (broken,), (), ()
    )
    assert found.to_json()["effects"][0]["gradient_norm"] is None
    line = next(line for line in as_text(found).splitlines() if "surrogate" in line and "all" in line)
    assert line.split()[-1] == "nan" and " - " in line
