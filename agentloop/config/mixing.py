"""What a run can be told about the composition of its batches, and the rule it comes to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from agentloop.config.section import Fraction, NonNegative, Positive, Section
from replay import declared
from replay.mixing.request import Limits
from replay.mixing.rule import MixRule

if TYPE_CHECKING:
    from agentloop.config import RunConfig

Step = tuple[NonNegative, Fraction]


class ScheduleSection(Section):
    shape: Literal["constant", "linear", "cosine", "step"] = Field(
        "constant", description="Course of replay.fraction: constant, to `final`, or in `steps`."
    )
    final: Fraction | None = Field(None, description="Share at `end` (linear, cosine).")
    over: Literal["progress", "iterations"] = Field(
        "progress", description="What places are counted in: 0 to 1 of the run, or iterations from 1."
    )
    begin: NonNegative | None = Field(
        None, description="Where the course leaves replay.fraction (linear, cosine); null: at the first iteration."
    )
    end: NonNegative | None = Field(
        None, description="Where it reaches `final` (linear, cosine); null: at the last iteration."
    )
    steps: tuple[Step, ...] = Field(
        (), description="[place, share] pairs, each share holding from its place on (step), e.g. [[0.5, 0.1]]."
    )

    @model_validator(mode="after")
    def _fits_its_shape(self) -> Self:
        sloping = self.shape in ("linear", "cosine")
        if sloping and self.final is None:
            raise ValueError(f"replay.schedule.final must be a share when shape is {self.shape}, got null. Set it.")
        if self.shape == "step" and not self.steps:
            raise ValueError(
                "replay.schedule.steps must hold a pair when shape is step, got []. Set [[0.5, 0.1]], say."
            )
        unused: dict[str, object] = (
            {"steps": self.steps} if sloping else {"final": self.final, "begin": self.begin, "end": self.end}
        )
        if self.shape == "constant":
            unused["steps"] = self.steps
        for name, value in unused.items():
            if value not in (None, ()):
                raise ValueError(
                    f"replay.schedule.{name} must be left out when replay.schedule.shape is {self.shape}, got {value}. "
                    "Remove it, or set the shape that uses it."
                )
        if self.begin is not None and self.end is not None and self.begin >= self.end:
            raise ValueError(f"replay.schedule.end must be above begin ({self.begin:g}), got {self.end:g}. Raise it.")
        places = [place for place, _ in self.steps]
        if sorted(set(places)) != places:
            raise ValueError(f"replay.schedule.steps must have ascending places, got {places}. Sort them.")
        beyond = [place for place in (self.begin, self.end, *places) if place is not None and place > 1]
        if self.over == "progress" and beyond:
            raise ValueError(
                f"replay.schedule.over must be iterations for a place beyond 1, got {beyond[0]:g} of progress. "
                "Set replay.schedule.over: iterations."
            )
        return self


class StartSection(Section):
    iteration: Positive = Field(1, description="First iteration with replay.")
    progress: Fraction = Field(0.0, description="No replay before this share of the run.")
    success_rate: Fraction | None = Field(
        None, description="No replay before an iteration's fresh episodes succeed this often; once is enough."
    )
    buffer: int = Field(0, ge=0, description="No replay before this many rows can be drawn.")


class EssSection(Section):
    weights: Literal["mean", "sequence", "token"] = Field(
        "token",
        description="Whose ratios the ESS is over: each token's own, or of each trajectory their product (sequence) or "
        "their geometric mean (mean), which hardly ever leaves 1.",
    )
    floor: Fraction = Field(0.5, description="ESS under which an age bucket of the replay stream is too far off.")
    lower_by: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.5, description="The fraction is multiplied by this after an iteration with a bucket under the floor."
    )
    raise_by: Annotated[float, Field(gt=1.0)] = Field(
        1.1, description="And by this after any other one, up to what is configured."
    )
    least: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.1, description="The fraction is never lowered below this share of what is configured."
    )


def mix_rule(config: RunConfig) -> MixRule:
    """The declared composition of the run's batches."""
    return declared.mix_rule(_plain(config))


def check_mixing(config: RunConfig) -> None:
    """Raises ValueError where the parts of the configuration can't be mixed as asked."""
    declared.check(_plain(config))


def check_task_pool(config: RunConfig, when: str) -> None:
    """Raises ValueError where no task comes twice."""
    declared.check_task_pool(_plain(config), when)


def limits(config: RunConfig) -> Limits:
    """Which rows a draw may take at all."""
    return declared.limits(_plain(config)["replay"])


def _plain(config: RunConfig) -> declared.Config:
    return config.model_dump(include={part: set(names) for part, names in declared.DEFAULTS.items()})
