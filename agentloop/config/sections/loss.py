"""What the configuration says about the loss: objectives, ratios and corrections of each kind of row."""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from replay.setting_types import BelowOne, NonNegative, PositiveFloat, Section


class PlainObjective(Section):
    name: Literal["reinforce", "surrogate", "gpg"]


class PpoClip(Section):
    name: Literal["ppo_clip"] = "ppo_clip"
    clip_low: BelowOne = 0.2
    clip_high: NonNegative = 0.28
    dual_clip: Annotated[float, Field(gt=1.0)] | None = 3.0


class ReplayPpoClip(PpoClip):
    clip_high: NonNegative = 0.2


class Gspo(Section):
    name: Literal["gspo"]
    clip_low: BelowOne = 3e-4
    clip_high: NonNegative = 4e-4


class Cispo(Section):
    name: Literal["cispo"]
    ratio_low: NonNegative = 0.0
    ratio_high: PositiveFloat = 5.0


class Sapo(Section):
    name: Literal["sapo"]
    tau_positive: PositiveFloat = 1.0
    tau_negative: PositiveFloat = 1.05


class Gmpo(Section):
    name: Literal["gmpo"]
    log_ratio_low: NonNegative = 0.4
    log_ratio_high: NonNegative = 0.4


class DppoTv(Section):
    name: Literal["dppo_tv"]
    divergence_low: NonNegative = 0.15
    divergence_high: NonNegative = 0.15
    ratio_high: PositiveFloat = 20.0


class DppoKl(Section):
    name: Literal["dppo_kl"]
    divergence_low: NonNegative = 0.05
    divergence_high: NonNegative = 0.05
    ratio_high: PositiveFloat = 20.0


class Topr(Section):
    name: Literal["topr"]
    ratio_high: PositiveFloat = 1.0


class Exgrpo(Section):
    name: Literal["exgrpo"]
    beta: PositiveFloat = 0.1


class Luffy(Section):
    name: Literal["luffy"]
    gamma: PositiveFloat = 0.1


class Bc(Section):
    name: Literal["bc"]
    coef: PositiveFloat = 1.0
    weighting: Literal["uniform", "advantage"] = "uniform"


class OwnObjective(Section):
    """A function in a file of the user's."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)


def _alone(key: str) -> BeforeValidator:
    """A text stands for a section with that key and all defaults."""
    return BeforeValidator(lambda given: {key: given} if isinstance(given, str) else given)


def _whose(given: Any) -> str:
    name = given.get("name") if isinstance(given, dict) else getattr(given, "name", None)
    return "own" if ".py:" in str(name) else "built_in"


_Others = PlainObjective | Gspo | Cispo | Sapo | Gmpo | DppoTv | DppoKl | Topr | Exgrpo | Luffy | Bc
_ByName = Field(discriminator="name")
_FreshBuiltIn = Annotated[PpoClip | _Others, _ByName, Tag("built_in")]
_ReplayBuiltIn = Annotated[ReplayPpoClip | _Others, _ByName, Tag("built_in")]
_Own = Annotated[OwnObjective, Tag("own")]
FreshObjective = Annotated[_FreshBuiltIn | _Own, Discriminator(_whose), _alone("name")]
ReplayObjective = Annotated[_ReplayBuiltIn | _Own, Discriminator(_whose), _alone("name")]
OBJECTIVE_NAMES: tuple[str, ...] = tuple(
    name for kind in get_args(PpoClip | _Others) for name in get_args(kind.model_fields["name"].annotation)
)
_WITHOUT_RATIO = frozenset({"reinforce", "gpg", "luffy", "bc"})
"""Their anchor is a denominator of nothing but the metrics."""
UNBOUNDED = _WITHOUT_RATIO | {"surrogate"}
"""Nothing in them bounds how far an update goes from the policy that sampled."""


class PlainMissing(Section):
    name: Literal["reject", "recompute"] = "reject"


MissingLogProbs = Annotated[PlainMissing | Luffy | Bc, _ByName, _alone("name")]


class NoCorrection(Section):
    kind: Literal["none"] = "none"


class _OfUnits(Section):
    kind: str
    level: Literal["token", "turn", "sequence"] = "token"
    mean: Literal["product", "geometric"] = "product"


class Truncation(_OfUnits):
    kind: Literal["truncate"]
    ratio_high: PositiveFloat = 2.0


class RatioBounds(_OfUnits):
    kind: Literal["mask", "rejection"]
    ratio_low: NonNegative = 0.0
    ratio_high: PositiveFloat = 2.0

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.ratio_low > self.ratio_high:
            raise ValueError(f"must have ratio_low of at most ratio_high ({self.ratio_high:g}), got {self.ratio_low:g}")
        return self


class VTrace(_OfUnits):
    kind: Literal["v_trace"]
    ratio_high: PositiveFloat = 1.0
    trace_high: PositiveFloat = 1.0


Correction = Annotated[NoCorrection | Truncation | RatioBounds | VTrace, Field(discriminator="kind"), _alone("kind")]
_OBJECTIVE = (
    "Loss of a token: a name with its options, a name alone with their defaults, or {name: path/to/file.py:function, "
    "options: {...}} for one of your own; formulas in docs/algorithms.md."
)


class StreamLossSection(Section):
    anchor: Literal["old", "behavior"] = Field("old", description="Ratio's denominator: recomputed or as stored.")
    objective: FreshObjective = Field(default_factory=PpoClip, description=_OBJECTIVE)
    missing_log_probs: MissingLogProbs = Field(
        default_factory=PlainMissing,
        description="Trained tokens whose behavior log-prob is unknown. reject: an error where one is needed; luffy, "
        "bc: they get that objective, whose options may stand with it; recompute: old log-probs stand in.",
    )
    allow_truncated_sampling: bool = Field(
        False,
        description="Form ratios with behavior log-probs of rows sampled with top_p or top_k, which are not those of "
        "the whole distribution.",
    )
    correction: Correction = Field(
        default_factory=NoCorrection,
        description="How the ratio old / behavior weighs the loss; needs anchor old. A kind with its options, or "
        "alone; see docs/algorithms.md.",
    )

    @property
    def needs_behavior(self) -> bool:
        """True if a behavior log-prob enters a ratio of the loss."""
        has_ratio = self.objective.name not in _WITHOUT_RATIO
        return self.correction.kind != "none" or (self.anchor == "behavior" and has_ratio)

    @property
    def rejects_missing(self) -> bool:
        """True if a trained token without a behavior log-prob that its ratio needs is an error."""
        return self.needs_behavior and self.missing_log_probs.name == "reject"


class ReplayLossSection(StreamLossSection):
    anchor: Literal["old", "behavior"] = Field("behavior", description="Ratio's denominator: recomputed or as stored.")
    objective: ReplayObjective = Field(default_factory=ReplayPpoClip, description=_OBJECTIVE)


class LossSection(Section):
    fresh: StreamLossSection = Field(default_factory=StreamLossSection, description="Loss of the fresh stream.")
    replay: ReplayLossSection = Field(default_factory=ReplayLossSection, description="Loss of the replay stream.")
    hinted: StreamLossSection | None = Field(
        None,
        description="Loss of fresh rows that were sampled in sight of a hint (context.strategy: hint), with the keys "
        "of fresh; null: that of fresh. See docs/algorithms.md.",
    )
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = Field(
        "token-mean", description="How token losses become one number; formulas in docs/algorithms.md."
    )
    norm_length: PositiveFloat | None = Field(None, description="Constant of seq-mean-token-sum-norm, in tokens.")
    normalise: Literal["joint", "per_stream"] = Field("joint", description="One denominator for both streams, or two.")
    entropy_coef: NonNegative = Field(0.0, description="Weight of the entropy bonus.")

    def parts(self) -> dict[str, StreamLossSection]:
        """The losses that are configured, by the names of their sections."""
        hinted = {} if self.hinted is None else {"hinted": self.hinted}
        return {"fresh": self.fresh, "replay": self.replay, **hinted}
