"""Which tasks a run is made of, as the configuration says it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from replay.config import TaskData, check_task_pool
from replay.setting_types import Section

if TYPE_CHECKING:
    from agentloop.config.run_config import RunConfig

_Share = Annotated[float, Field(gt=0.0, lt=1.0)]


class TasksSection(TaskData, Section):
    """Rows of a data set as tasks, and the order in which a pool of tasks is gone through."""

    subset: str | None = Field(None, description="Configuration of a Hugging Face data set that has several.")
    revision: str | None = Field(None, description="Commit of a data set on the hub.")
    split: str | None = Field(
        None,
        description="Split to train on; null: train, and all rows of a file that is one split. In a file that holds "
        "several, the field `split` of a row says which it is of.",
    )
    held_out: str | None = Field(None, description="Split to evaluate on; null: a share of the training split.")
    held_out_share: _Share = Field(
        0.1, description="That share, about; equal rows are on one side, as their content decides."
    )
    shuffle: bool = Field(True, description="Tasks of a pool come in a new order per epoch; false: as the rows stand.")
    curriculum: Literal["none", "learnability"] = Field(
        "none",
        description="How a task's success rate so far decides when it comes: learnability, drawn with weight "
        "p (1 - p); see docs/data.md.",
    )
    curriculum_decay: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.5, description="What is left of a task's earlier counts each time it is tried again; 1: all counts alike."
    )
    curriculum_floor: _Share = Field(
        0.1, description="Least weight of a task (learnability), as a share of the greatest."
    )

    @model_validator(mode="after")
    def _splits_differ(self) -> Self:
        if self.held_out is not None and self.held_out == (self.split or "train"):
            raise ValueError(
                f"tasks.held_out must be another split than the one that is trained on, got {self.held_out!r} twice. "
                "Leave it out to hold out a share."
            )
        return self


def check_tasks(config: RunConfig) -> None:
    """Raises ValueError where an order is asked for of tasks that never come twice."""
    tasks = config.tasks
    if tasks.curriculum != "none" or not tasks.shuffle:
        key, value = ("shuffle", "false") if not tasks.shuffle else ("curriculum", tasks.curriculum)
        check_task_pool(tasks, config.environment, f"tasks.{key} is {value} and tasks.data is null")
