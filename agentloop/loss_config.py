"""What a run can be told about its loss: the ratios of both streams, advantages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentloop.config_section import NonNegative, PositiveFloat, Section


class StreamLossSection(Section):
    anchor: Literal["old", "behavior"] = Field(
        "old", description="Denominator of the ratio: recomputed `old` or stored `behavior`."
    )
    clip_low: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.2, description="Ratios below 1 - clip_low are clipped.")
    clip_high: NonNegative = Field(0.28, description="Ratios above 1 + clip_high are clipped.")
    dual_clip: Annotated[float, Field(gt=1.0)] | None = Field(
        3.0,
        description="Where the advantage is negative, the loss is at most dual_clip x |advantage|; null: off.",
    )


class ReplayLossSection(StreamLossSection):
    anchor: Literal["old", "behavior"] = Field(
        "behavior", description="Denominator of the ratio: recomputed `old` or stored `behavior`."
    )
    clip_high: NonNegative = Field(0.2, description="Ratios above 1 + clip_high are clipped.")
    dual_clip: Annotated[float, Field(gt=1.0)] | None = Field(
        None, description="Where the advantage is negative, the loss is at most dual_clip x |advantage|; null: off."
    )


class LossSection(Section):
    fresh: StreamLossSection = Field(default_factory=StreamLossSection, description="Ratios of the fresh stream.")
    replay: ReplayLossSection = Field(default_factory=ReplayLossSection, description="Ratios of the replay stream.")
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = Field(
        "token-mean", description="How token losses become one number; formulas in docs/concepts.md."
    )
    norm_length: PositiveFloat | None = Field(None, description="Constant of seq-mean-token-sum-norm, in tokens.")
    normalise: Literal["joint", "per_stream"] = Field(
        "joint", description="One denominator for both streams, or one each."
    )
    entropy_coef: NonNegative = Field(0.0, description="Weight of the entropy bonus.")


class AdvantageSection(Section):
    normalise_std: bool = Field(
        True, description="Divide by the group's standard deviation (GRPO); false: only centre (Dr. GRPO)."
    )
