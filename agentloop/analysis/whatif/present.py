"""What `replay whatif` found, as a terminal shows it."""

from __future__ import annotations

from collections.abc import Iterator

from agentloop.analysis.whatif.result import Effect, WhatIf
from replay.cli.tables import number, table

_DATA = "bucket rows tokens unknown drift most ESS"
_EFFECTS = "bucket objective trained clipped above below dual p01 p50 p99 loss gradient"


def as_text(found: WhatIf) -> str:
    return "\n".join(_lines(found))


def _lines(found: WhatIf) -> Iterator[str]:
    yield from heading(found)
    yield ""
    yield "the rows, the same for every objective:"
    yield table(
        _DATA.split(),
        [
            [
                part.bucket,
                str(part.trajectories),
                str(part.tokens),
                str(part.unknown),
                number(part.drift_mean, 3),
                number(part.drift_max, 2),
                number(part.ess, 3),
            ]
            for part in found.data
        ],
    )
    yield ""
    yield "one optimizer step of each objective, alone on the rows of a bucket and on all:"
    yield table(_EFFECTS.split(), [_effect(effect) for effect in found.effects])
    for note in found.notes:
        yield f"note: {note}"


def heading(found: WhatIf) -> Iterator[str]:
    """Whose rows, which policy, which objectives, and what is in no number."""
    looked_at = found.data[-1].trajectories
    thinned = "" if looked_at == found.found else f" of {found.found:,}, evenly over their age"
    yield f"policy      {found.version} of {found.run} ({found.weights})"
    yield f"rows        {looked_at:,}{thinned}: {found.rows}; advantages are {found.advantages}"
    for part in found.left_out:
        more = "" if part.count == len(part.ids) else ", ..."
        yield f"left out    {part.count:,}, {part.why}: {', '.join(id[:12] for id in part.ids)}{more}"
    width = max(len(objective.name) for objective in found.objectives)
    for objective in found.objectives:
        yield f"objective   {objective.name:<{width}}  fresh {objective.fresh}; replay {objective.replay}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}%"


def _effect(effect: Effect) -> list[str]:
    return [
        effect.bucket,
        effect.objective,
        str(effect.trained_tokens),
        percent(effect.clipped),
        percent(effect.clipped_above),
        percent(effect.clipped_below),
        percent(effect.clipped_dual),
        *(number(value, 3) for value in (effect.ratio_p01, effect.ratio_p50, effect.ratio_p99)),
        f"{effect.loss:.5f}",
        f"{effect.gradient_norm:.4g}",
    ]
