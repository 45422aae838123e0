"""The section `reward`: who gives rewards, and how much each counts."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from replay.setting_types import Positive, PositiveFloat, Section, alone

Weight = Annotated[float, Field(allow_inf_nan=False)]


class RewardFunctionSection(Section):
    """One function of the user's with its weight; the name alone is enough for weight 1."""

    function: str = Field(description="`path/to/file.py:function`, def or async def, that takes an ended episode.")
    weight: Weight = Field(1.0, description="Factor of its numbers; negative for a cost.")

    @property
    def name(self) -> str:
        """The function's name in metrics."""
        return self.function.rpartition(":")[2]


class RewardSection(Section):
    environment: Weight = Field(1.0, description="Weight of the environment's own score.")
    functions: tuple[Annotated[RewardFunctionSection, alone("function")], ...] = Field(
        (),
        description="Reward functions of yours, added by weight; e.g. {function: rewards.py:brief, weight: 0.1}, "
        "or rewards.py:right for weight 1. In the environment `rows` the first one decides what a success is.",
    )
    parallel: Positive = Field(32, description="Most async reward functions that wait at once.")
    timeout_s: PositiveFloat = Field(60.0, description="Seconds one reward function may take for one episode.")
    on_error: Literal["stop", "drop"] = Field(
        "stop",
        description="A reward function that fails or takes too long: stop the run, or leave the episode out of its "
        "group and count it.",
    )

    @model_validator(mode="after")
    def _functions_are_there_with_names(self) -> Self:
        names = [row.name for row in self.functions]
        for name in names:
            if names.count(name) > 1 or name == "environment":
                raise ValueError(
                    f"reward.functions must have names of their own, got {name!r} twice. Rename the function: metrics "
                    "call it by its name."
                )
        return self
