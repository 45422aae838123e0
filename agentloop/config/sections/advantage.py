"""The section `advantage`: how advantages are computed, normalised and given to turns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from agentloop.algorithms.catalog import ALGORITHMS
from replay.config import check_task_pool
from replay.setting_types import Fraction, NonNegative, Section

if TYPE_CHECKING:
    from agentloop.config import RunConfig


class AdvantageSection(Section):
    function: str | None = Field(
        None,
        description="`path/to/file.py:function` that takes the members of a group and returns their advantages, "
        "instead of the algorithm.",
    )
    normalise_batch: Literal["none", "scale", "whiten"] = Field(
        "none",
        description="Divide the advantages of the batch by their root mean square (scale), or take off the mean of the "
        "fresh rows first (whiten); where groups are compared, those of exactly 0 stay 0. See docs/algorithms.md.",
    )
    credit: Literal["trajectory", "turn"] = Field(
        "trajectory",
        description="trajectory: one advantage for all tokens of a trajectory; turn: one for each reply, from the "
        "environment's turn_rewards for it and for later replies.",
    )
    turn_gamma: Fraction = Field(1.0, description="Discount per turn of what follows a reply (credit turn).")
    turn_coef: NonNegative = Field(
        1.0, description="Weight of single turns' advantages, added to the trajectory's (credit turn)."
    )


def check_advantages(config: RunConfig) -> None:
    """Raises ValueError for settings of replay that don't fit the batch, or don't fit the chosen advantages."""
    config.replay.check(config.batch, config.tasks, config.environment, config.run.schedule_length)
    if not config.tasks.shuffle:
        check_task_pool(config.tasks, config.environment, "tasks.shuffle is false and tasks.data is null")
    replay, function, algorithm = config.replay, config.advantage.function, ALGORITHMS[config.algorithm]
    credit, trains = config.advantage.credit, config.replay_trains()
    if credit == "turn" and trains and replay.baseline == "stored" and algorithm.compares_members:
        raise ValueError(
            "replay.baseline must not be stored when advantage.credit is turn: rows are stored with the advantage of "
            "the whole trajectory alone. Use shared, split or fresh_only."
        )
    by_task = function is not None or algorithm.compares == "group"
    needs_fresh = replay.baseline == "fresh_only" or replay.unit != "group"
    if trains and replay.baseline != "stored" and by_task and needs_fresh:
        check_task_pool(config.tasks, config.environment, f"replay.baseline is {replay.baseline}")
