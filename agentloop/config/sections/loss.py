"""What the configuration says about the loss: objectives, ratios and corrections of both streams, advantages."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from replay.setting_types import BelowOne, NonNegative, PositiveFloat, Section

OBJECTIVE_NAMES = (
    "reinforce",
    "surrogate",
    "ppo_clip",
    "gspo",
    "cispo",
    "sapo",
    "gmpo",
    "gpg",
    "dppo_tv",
    "dppo_kl",
    "topr",
    "exgrpo",
    "luffy",
    "bc",
)
_WITHOUT_RATIO = frozenset({"reinforce", "gpg", "luffy", "bc"})
"""Their anchor is a denominator of nothing but the metrics."""
UNBOUNDED = _WITHOUT_RATIO | {"surrogate"}
"""Nothing in them bounds how far an update goes from the policy that sampled."""
AboveOne = Annotated[float, Field(gt=1.0)]


class PpoClipSection(Section):
    clip_low: BelowOne = Field(0.2, description="Ratios below 1 - clip_low are clipped.")
    clip_high: NonNegative = Field(0.28, description="Ratios above 1 + clip_high are clipped.")
    dual_clip: AboveOne | None = Field(
        3.0, description="Where the advantage is negative, the loss is at most dual_clip x |advantage|; null: off."
    )


class ReplayPpoClipSection(PpoClipSection):
    clip_high: NonNegative = Field(0.2, description="Ratios above 1 + clip_high are clipped.")
    dual_clip: AboveOne | None = Field(
        None, description="Where the advantage is negative, the loss is at most dual_clip x |advantage|; null: off."
    )


class GspoSection(Section):
    clip_low: BelowOne = Field(3e-4, description="Trajectory ratios below 1 - clip_low are clipped.")
    clip_high: NonNegative = Field(4e-4, description="Trajectory ratios above 1 + clip_high are clipped.")


class CispoSection(Section):
    ratio_low: NonNegative = Field(0.0, description="Smallest weight of a token; 0: no bound.")
    ratio_high: PositiveFloat = Field(5.0, description="Largest weight of a token.")


class SapoSection(Section):
    tau_positive: PositiveFloat = Field(1.0, description="Steepness where the advantage is positive.")
    tau_negative: PositiveFloat = Field(1.05, description="Steepness where it is not.")


class GmpoSection(Section):
    log_ratio_low: NonNegative = Field(0.4, description="Log-ratios below minus this are clipped.")
    log_ratio_high: NonNegative = Field(0.4, description="Log-ratios above this are clipped.")


class DppoTvSection(Section):
    divergence_low: NonNegative = Field(
        0.15, description="Where the advantage is negative: most that a token's probability may have fallen."
    )
    divergence_high: NonNegative = Field(
        0.15, description="Where the advantage is positive: most that a token's probability may have risen."
    )
    ratio_high: PositiveFloat = Field(20.0, description="Largest weight of a token.")


class DppoKlSection(Section):
    divergence_low: NonNegative = Field(
        0.05,
        description="Where the advantage is negative: largest divergence, in nats, of a token that has become rarer.",
    )
    divergence_high: NonNegative = Field(
        0.05,
        description="Where the advantage is positive: largest divergence, in nats, of one that has become likelier.",
    )
    ratio_high: PositiveFloat = Field(20.0, description="Largest weight of a token.")


class ToprSection(Section):
    ratio_high: PositiveFloat = Field(
        1.0, description="Largest weight of a trajectory where the advantage is negative."
    )


class ExgrpoSection(Section):
    beta: PositiveFloat = Field(0.1, description="Ratio at which the gradient is largest.")


class LuffySection(Section):
    gamma: PositiveFloat = Field(0.1, description="Probability at which the gradient is largest.")


class BcSection(Section):
    coef: PositiveFloat = Field(1.0, description="Weight of the cross-entropy.")
    weighting: Literal["uniform", "advantage"] = Field(
        "uniform", description="Every token alike, or by its advantage where that is positive."
    )


class CorrectionSection(Section):
    kind: Literal["none", "truncate", "mask", "rejection", "v_trace"] = Field(
        "none", description="How the ratio old / behavior weighs the loss; needs anchor old. See docs/algorithms.md."
    )
    level: Literal["token", "turn", "sequence"] = Field(
        "token", description="What has a ratio: a token, a reply of the policy, or the trajectory."
    )
    mean: Literal["product", "geometric"] = Field(
        "product", description="A turn's or trajectory's ratio: the product of its tokens', or their geometric mean."
    )
    ratio_low: PositiveFloat | None = Field(None, description="Lower bound of the ratio (mask, rejection); null: none.")
    ratio_high: PositiveFloat | None = Field(
        None, description="Upper bound of the ratio; null: none. truncate and v_trace need one; 2 and 1 are usual."
    )
    trace_high: PositiveFloat = Field(1.0, description="Upper bound of the ratios of later units (v_trace).")


class StreamLossSection(Section):
    anchor: Literal["old", "behavior"] = Field(
        "old", description="Denominator of the ratio: recomputed `old` or stored `behavior`."
    )
    objective: str = Field(
        "ppo_clip",
        description=f"Loss of a token: {', '.join(OBJECTIVE_NAMES)}, or `path/to/file.py:function` of your own; "
        "formulas in docs/algorithms.md.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of an objective of your own; the others have sections."
    )
    missing_log_probs: Literal["reject", "luffy", "bc", "recompute"] = Field(
        "reject",
        description="Trained tokens whose behavior log-prob is unknown. reject: an error where one is needed; luffy, "
        "bc: they get that objective; recompute: old log-probs stand in.",
    )
    allow_truncated_sampling: bool = Field(
        False,
        description="Form ratios with behavior log-probs of rows sampled with top_p or top_k, which are not those of "
        "the whole distribution.",
    )
    correction: CorrectionSection = Field(
        default_factory=CorrectionSection, description="Weights for the drift from the behavior to the old policy."
    )
    ppo_clip: PpoClipSection = Field(default_factory=PpoClipSection, description="Options of ppo_clip.")
    gspo: GspoSection = Field(default_factory=GspoSection, description="Options of gspo.")
    cispo: CispoSection = Field(default_factory=CispoSection, description="Options of cispo.")
    sapo: SapoSection = Field(default_factory=SapoSection, description="Options of sapo.")
    gmpo: GmpoSection = Field(default_factory=GmpoSection, description="Options of gmpo.")
    dppo_tv: DppoTvSection = Field(default_factory=DppoTvSection, description="Options of dppo_tv.")
    dppo_kl: DppoKlSection = Field(default_factory=DppoKlSection, description="Options of dppo_kl.")
    topr: ToprSection = Field(default_factory=ToprSection, description="Options of topr.")
    exgrpo: ExgrpoSection = Field(default_factory=ExgrpoSection, description="Options of exgrpo.")
    luffy: LuffySection = Field(default_factory=LuffySection, description="Options of luffy.")
    bc: BcSection = Field(default_factory=BcSection, description="Options of bc.")

    @property
    def needs_behavior(self) -> bool:
        """Whether a behavior log-prob enters a ratio of the loss."""
        return self.correction.kind != "none" or (self.anchor == "behavior" and self.objective not in _WITHOUT_RATIO)

    def options_of(self, objective: str) -> dict[str, Any]:
        """Keyword arguments of an objective, one of your own too."""
        if objective not in OBJECTIVE_NAMES:
            return dict(self.options)
        section = getattr(self, objective, None)
        return section.model_dump() if isinstance(section, Section) else {}


class ReplayLossSection(StreamLossSection):
    anchor: Literal["old", "behavior"] = Field(
        "behavior", description="Denominator of the ratio: recomputed `old` or stored `behavior`."
    )
    ppo_clip: ReplayPpoClipSection = Field(default_factory=ReplayPpoClipSection, description="Options of ppo_clip.")


class LossSection(Section):
    fresh: StreamLossSection = Field(default_factory=StreamLossSection, description="Loss of the fresh stream.")
    replay: ReplayLossSection = Field(default_factory=ReplayLossSection, description="Loss of the replay stream.")
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = Field(
        "token-mean", description="How token losses become one number; formulas in docs/algorithms.md."
    )
    norm_length: PositiveFloat | None = Field(None, description="Constant of seq-mean-token-sum-norm, in tokens.")
    normalise: Literal["joint", "per_stream"] = Field(
        "joint", description="One denominator for both streams, or one each."
    )
    entropy_coef: NonNegative = Field(0.0, description="Weight of the entropy bonus.")

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        normed = self.aggregation == "seq-mean-token-sum-norm"
        if normed and self.norm_length is None:
            raise ValueError(
                "loss.norm_length must be a number of tokens when loss.aggregation is seq-mean-token-sum-norm, "
                "got null. Set it, for example to context.max_tokens."
            )
        if not normed and self.norm_length is not None:
            raise ValueError(
                f"loss.norm_length must be null when loss.aggregation is {self.aggregation}, got "
                f"{self.norm_length:g}. Remove it, or set loss.aggregation: seq-mean-token-sum-norm."
            )
        for where, stream in (("loss.fresh", self.fresh), ("loss.replay", self.replay)):
            _check_objective(where, stream)
            _check_correction(where, stream)
        return self


def _check_objective(where: str, stream: StreamLossSection) -> None:
    own = stream.objective.partition(":")[0].endswith(".py")
    if not own and stream.objective not in OBJECTIVE_NAMES:
        raise ValueError(
            f"{where}.objective must be one of {', '.join(OBJECTIVE_NAMES)}, or path/to/file.py:function, "
            f"got {stream.objective!r}."
        )
    if stream.options and not own:
        raise ValueError(
            f"{where}.options must be empty when {where}.objective is {stream.objective}, got {stream.options}. "
            f"They are for an objective of your own; see {where}.{stream.objective}."
        )
    if stream.objective == "exgrpo" and stream.anchor != "behavior":
        raise ValueError(
            f"{where}.anchor must be behavior when {where}.objective is exgrpo, whose ratio is current over behavior, "
            f"got {stream.anchor}. Set {where}.anchor: behavior."
        )
    used = {stream.objective, stream.missing_log_probs}
    for name, field in type(stream).model_fields.items():
        if name not in OBJECTIVE_NAMES or name in used:
            continue
        default, given = field.get_default(call_default_factory=True), getattr(stream, name)
        for key in type(given).model_fields:
            if getattr(given, key) != getattr(default, key):
                raise ValueError(
                    f"{where}.{name}.{key} must be left at {_plain(default, key)} when {where}.objective is "
                    f"{stream.objective}, got {_plain(given, key)}. It is an option of {name}: remove it, or set "
                    f"{where}.objective: {name}."
                )


def _check_correction(where: str, stream: StreamLossSection) -> None:
    correction, where_kind = stream.correction, f"{where}.correction.kind"
    kind, default = correction.kind, CorrectionSection()
    if kind != "none" and stream.anchor != "old":
        raise ValueError(
            f"{where_kind} must be none when {where}.anchor is behavior, for drift would count twice, got {kind}. "
            f"Set {where}.anchor: old."
        )
    unused = {
        "none": ("level", "mean", "ratio_low", "ratio_high", "trace_high"),
        "truncate": ("ratio_low", "trace_high"),
        "mask": ("trace_high",),
        "rejection": ("trace_high",),
        "v_trace": ("ratio_low",),
    }[kind]
    for key in (*unused, *(("mean",) if correction.level == "token" else ())):
        if getattr(correction, key) != getattr(default, key):
            why = "level is token" if key == "mean" and key not in unused else f"kind is {kind}"
            raise ValueError(
                f"{where}.correction.{key} must be left at {_plain(default, key)} when {where}.correction.{why}, "
                f"got {_plain(correction, key)}. It would change nothing."
            )
    if kind in ("truncate", "v_trace") and correction.ratio_high is None:
        raise ValueError(
            f"{where}.correction.ratio_high must be a number when {where_kind} is {kind}, got null. "
            f"Set it, for example to {2 if kind == 'truncate' else 1}."
        )
    if kind in ("mask", "rejection") and correction.ratio_low is None and correction.ratio_high is None:
        raise ValueError(
            f"{where}.correction.ratio_high must be a number when {where_kind} is {kind} without ratio_low, got null. "
            "Set one of them or both, for example 0.5 and 5."
        )
    low, high = correction.ratio_low, correction.ratio_high
    if low is not None and high is not None and low > high:
        raise ValueError(
            f"{where}.correction.ratio_low must be at most {where}.correction.ratio_high ({high:g}), got {low:g}."
        )


def _plain(section: Section, key: str) -> str:
    value = getattr(section, key)
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
