"""What a run can be told about the composition of its batches, and the rule it comes to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from agentloop.config.section import Fraction, NonNegative, Positive, Section
from replay.controller import EssRule
from replay.mix_rule import SAME_TASK, MixRule, StartRule
from replay.schedules import Schedule

if TYPE_CHECKING:
    from agentloop.config import ReplaySection, RunConfig

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

    def course(self, fraction: float, iterations: int) -> Schedule:
        first, last = (0.0, 1.0) if self.over == "progress" else (1.0, float(iterations))
        begin = first if self.begin is None else self.begin
        end = last if self.end is None else self.end
        final = fraction if self.final is None else self.final
        return Schedule(fraction, self.shape, final, self.over, begin, max(begin, end), self.steps)


class StartSection(Section):
    iteration: Positive = Field(1, description="First iteration with replay.")
    progress: Fraction = Field(0.0, description="No replay before this share of the run.")
    success_rate: Fraction | None = Field(
        None, description="No replay before an iteration's fresh episodes succeed this often; once is enough."
    )
    buffer: int = Field(0, ge=0, description="No replay before this many rows can be drawn.")


class EssSection(Section):
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
    replay = config.replay
    start, ess = replay.start, replay.ess
    return MixRule(
        trajectories=config.batch.trajectories,
        group_size=config.batch.group_size,
        fraction=replay.schedule.course(replay.fraction, config.run.iterations),
        unit=replay.unit,
        task_members=replay.task_members or 0,
        sources=replay.sources,
        start=StartRule(start.iteration, start.progress, start.success_rate, start.buffer),
        controller=EssRule(ess.floor, ess.lower_by, ess.raise_by, ess.least) if replay.controller == "ess" else None,
        shortfall=replay.shortfall,
        mode=replay.mode,
    )


def check_mixing(config: RunConfig) -> None:
    """Raises ValueError where the parts of the configuration can't be mixed as asked."""
    replay = config.replay
    _check_sources(replay)
    if replay.unit != "any" and config.batch.trajectories % config.batch.group_size:
        raise ValueError(
            f"batch.trajectories must be a multiple of batch.group_size ({config.batch.group_size}) when replay.unit "
            f"is {replay.unit}, got {config.batch.trajectories}. Change one of them, or set replay.unit: any."
        )
    for name, most in (("per_task", replay.per_task), ("per_group", replay.per_group)):
        if replay.unit == "group" and most is not None and most < config.batch.group_size:
            raise ValueError(
                f"replay.{name} must be at least batch.group_size ({config.batch.group_size}) when replay.unit is "
                f"group, whose groups are drawn whole, got {most}. Raise it, or leave it out."
            )
    if replay.unit == "group" and replay.successful_only:
        raise ValueError(
            "replay.successful_only must be false when replay.unit is group, whose members are drawn whole, got true. "
            "Set replay.successful_only: false."
        )
    if replay.unit in SAME_TASK:
        needs_task_pool(config, f"replay.unit is {replay.unit}")
    if replay.complete_zero_variance:
        _check_completion(config)
    _check_task_members(config)


def _check_sources(replay: ReplaySection) -> None:
    shares = replay.sources
    if shares and (min(shares.values()) <= 0 or abs(sum(shares.values()) - 1) > 1e-6):
        raise ValueError(
            f"replay.sources must have shares above 0 that sum to 1, got {dict(shares)}. "
            "They divide the replayed rows; replay.fraction says how many there are."
        )


def needs_task_pool(config: RunConfig, when: str) -> None:
    if config.environment.task_pool == "unlimited" and config.tasks.data is None:
        raise ValueError(
            f"environment.task_pool must be a number when {when}, got unlimited: no task comes twice, so none is ever "
            "in the buffer when it comes. Set it, for example to 500, or name rows with tasks.data."
        )


def _check_completion(config: RunConfig) -> None:
    replay = config.replay
    if replay.mode == "observe" or replay.unit == "group":
        key, value = ("mode", "observe") if replay.mode == "observe" else ("unit", "group")
        raise ValueError(
            f"replay.complete_zero_variance must be false when replay.{key} is {value}, got true. "
            "Only single rows that are trained on can complete a group."
        )
    needs_task_pool(config, "replay.complete_zero_variance is true")


def _check_task_members(config: RunConfig) -> None:
    replay, size = config.replay, config.batch.group_size
    if replay.unit != "task":
        if replay.task_members is not None:
            raise ValueError(
                f"replay.task_members must be left out when replay.unit is {replay.unit}, got {replay.task_members}. "
                "Remove it, or set replay.unit: task."
            )
        return
    if replay.task_members is None or replay.task_members > size:
        raise ValueError(
            f"replay.task_members must be a number from 1 to batch.group_size ({size}) when replay.unit is task, "
            f"got {'null' if replay.task_members is None else replay.task_members}. Set how many members of a mixed "
            "group are replayed."
        )
    highest = config.mix_rule().fraction.highest
    if highest * size > replay.task_members + 1e-9:
        raise ValueError(
            f"replay.task_members must be at least replay.fraction x batch.group_size ({highest:g} x {size}), got "
            f"{replay.task_members}: with every group mixed, that many of {size} are all there is. Raise it, or lower "
            "replay.fraction."
        )
