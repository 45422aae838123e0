"""What the configuration says about rewards: who gives them, and how much each counts."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from replay.setting_types import Positive, PositiveFloat, Section

Weight = Annotated[float, Field(allow_inf_nan=False)]


class RewardFunctionSection(Section):
    """One function of the user's, and its weight; also written as its name alone."""

    function: str = Field(description="`path/to/file.py:function`, def or async def, that is given an ended episode.")
    weight: Weight = Field(1.0, description="What its numbers are multiplied by; negative for a cost.")

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, given: Any) -> Any:
        return {"function": given} if isinstance(given, str) else given

    @property
    def name(self) -> str:
        """What metrics call it."""
        return self.function.rpartition(":")[2]


class OverlongSection(Section):
    """Soft overlong punishment."""

    buffer: Positive | None = Field(
        None,
        description="Tokens before context.max_tokens from which a longest training sequence costs reward, the more "
        "the longer; null: length costs nothing.",
    )
    penalty: PositiveFloat = Field(1.0, description="What an episode loses that reached the limit, or was cut short.")


class RewardSection(Section):
    environment: Weight = Field(1.0, description="Weight of the environment's own score.")
    functions: tuple[RewardFunctionSection, ...] = Field(
        (),
        description="Rewards of one's own, added by weight; for example {function: rewards.py:brief, weight: 0.1}, or "
        "rewards.py:right for weight 1. In the environment `rows` the first one says what a success is.",
    )
    overlong: OverlongSection = Field(default_factory=OverlongSection, description="What too long an episode costs.")
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
            if names.count(name) > 1 or name in ("environment", "overlong"):
                raise ValueError(
                    f"reward.functions must have names of their own, got {name!r} twice. Rename the function: metrics "
                    "call it by its name."
                )
        return self
