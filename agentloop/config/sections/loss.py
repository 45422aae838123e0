"""The configuration of the loss: objectives, ratios and corrections of each kind of row."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias, Union

from pydantic import Discriminator, Field, Tag, create_model, model_validator

from agentloop.algorithms.catalog import OBJECTIVES
from agentloop.algorithms.declarations import Objective
from replay.setting_types import NonNegative, PositiveFloat, Section, alone


class ObjectiveSection(Section):
    """An objective with its options: each has a class of its own, made from what the objective declares."""

    name: str

    @property
    def arguments(self) -> dict[str, Any]:
        """The options, as its function takes them."""
        return self.model_dump(exclude={"name"})


class OwnObjective(ObjectiveSection):
    """A function in a file of the user's."""

    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.options)


def _section_of(objective: Objective, stream: str, defaults: Mapping[str, Any]) -> type[ObjectiveSection]:
    options = {name: (kind, defaults.get(name, default)) for name, (kind, default) in objective.options.items()}
    fields: dict[str, Any] = {"name": (Literal[objective.name], ...), **options}
    made = create_model(f"{stream}_{objective.name}", __base__=ObjectiveSection, __module__=__name__, **fields)
    globals()[made.__name__] = made  # where pickle looks for it
    return made


_FRESH = {name: _section_of(each, "fresh", {}) for name, each in OBJECTIVES.items()}
_REPLAY = {name: _section_of(each, "replay", each.replay_defaults) for name, each in OBJECTIVES.items()}


def _whose(given: Any) -> str:
    name = given.get("name") if isinstance(given, dict) else getattr(given, "name", None)
    return "own" if ".py:" in str(name) else "built_in"


def _by_name(sections: Iterable[type[Section]]) -> Any:
    return Annotated[Union[tuple(sections)], Field(discriminator="name")]  # noqa: UP007


def _built_in_or_own(sections: Iterable[type[Section]]) -> Any:
    built_in, own = Annotated[_by_name(sections), Tag("built_in")], Annotated[OwnObjective, Tag("own")]
    return Annotated[built_in | own, Discriminator(_whose), alone("name")]


class PlainMissing(ObjectiveSection):
    """The ways to treat unknown behavior log-probs that don't change the objective."""

    name: Literal["reject", "recompute"] = "reject"


if TYPE_CHECKING:
    FreshObjective: TypeAlias = ObjectiveSection
    ReplayObjective: TypeAlias = ObjectiveSection
    MissingLogProbs: TypeAlias = ObjectiveSection
else:
    FreshObjective, ReplayObjective = _built_in_or_own(_FRESH.values()), _built_in_or_own(_REPLAY.values())
    _REPLACING = [_FRESH[name] for name, objective in OBJECTIVES.items() if objective.replaces_missing]
    MissingLogProbs = Annotated[_by_name([PlainMissing, *_REPLACING]), alone("name")]


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


Correction = Annotated[NoCorrection | Truncation | RatioBounds, Field(discriminator="kind"), alone("kind")]
_OBJECTIVE = (
    "Loss of a token: a name with its options, a name alone with their defaults, or {name: path/to/file.py:function, "
    "options: {...}} for one of your own; formulas in docs/algorithms.md."
)


class StreamLossSection(Section):
    anchor: Literal["old", "behavior"] = Field("old", description="Ratio's denominator: recomputed or as stored.")
    objective: FreshObjective = Field(
        default_factory=partial(_FRESH["ppo_clip"], name="ppo_clip"), description=_OBJECTIVE
    )
    missing_log_probs: MissingLogProbs = Field(
        default_factory=PlainMissing,
        description="Trained tokens whose behavior log-prob is unknown. reject: an error where one is needed; luffy, "
        "bc: they get that objective, whose options may stand with it; recompute: old log-probs stand in.",
    )
    correction: Correction = Field(
        default_factory=NoCorrection,
        description="How the ratio old / behavior weighs the loss; needs anchor old. A kind with its options, or "
        "alone; see docs/algorithms.md.",
    )

    @property
    def needs_behavior(self) -> bool:
        """True if a behavior log-prob enters a ratio of the loss."""
        built_in = OBJECTIVES.get(self.objective.name)
        has_ratio = built_in is None or built_in.has_ratio
        return self.correction.kind != "none" or (self.anchor == "behavior" and has_ratio)

    @property
    def rejects_missing(self) -> bool:
        """True if a trained token without a behavior log-prob that its ratio needs is an error."""
        return self.needs_behavior and self.missing_log_probs.name == "reject"


class ReplayLossSection(StreamLossSection):
    anchor: Literal["old", "behavior"] = Field("behavior", description="Ratio's denominator: recomputed or as stored.")
    objective: ReplayObjective = Field(
        default_factory=partial(_REPLAY["ppo_clip"], name="ppo_clip"), description=_OBJECTIVE
    )


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
