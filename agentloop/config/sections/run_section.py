"""The sections `run`, `checkpoint`, `metrics`, `sft` and `warm_up`: the run itself, and supervised training."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from replay.config import RunLength
from replay.setting_types import Fraction, Positive, PositiveFloat, Section


class RunSection(RunLength, Section):
    name: str = Field("run", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="Name of the run, and of its folder.")
    folder: str = Field("runs", description="Where run folders are made: <folder>/<name>-001, -002, ...")
    threads: Positive = Field(1, description="CPU threads of torch. One is best for tiny models or on busy cores.")
    stop_at_success: Fraction | None = Field(
        None, description="End early once held-out success reaches this share in two evaluations in a row; null: never."
    )
    patience: Positive | None = Field(
        None, description="End early after so many evaluations in a row without a better one; null: never."
    )


class CheckpointSection(Section):
    every: Positive = Field(5, description="Iterations between full checkpoints (weights, optimizer, random states).")
    keep: Positive = Field(2, description="Full checkpoints kept.")
    best: Literal["eval/success"] | None = Field(
        "eval/success", description="Also keep the weights with the best held-out success, in RUN/best; null: don't."
    )
    keep_policies: Positive | Literal["all", "none"] = Field(
        "none", description="Policy snapshots (weights only) kept, one per publish; needed to verify stored log-probs."
    )


def _known_sink(name: str) -> str:
    if ":" not in name and name not in ("tensorboard", "wandb", "trackio"):
        raise ValueError(f"must be tensorboard, wandb, trackio or path/to/file.py:ClassName, got {name!r}")
    return name


class MetricsSection(Section):
    sinks: tuple[Annotated[str, AfterValidator(_known_sink)], ...] = Field(
        (),
        description="Besides the database and metrics.jsonl: tensorboard, wandb, trackio, or "
        "`path/to/file.py:ClassName` of your own; see docs/data.md.",
    )


class SftSection(Section):
    """Data, length and learning rate of `agentloop sft`."""

    data: str | None = Field(None, description="Conversations in OpenAI's chat format, a line each: .jsonl(.gz).")
    held_out: str | None = Field(None, description="Others, to measure the loss on; null: a share of data is left out.")
    held_out_share: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.1, description="Approximate share to leave out; a line's content decides, so equal lines are on one side."
    )
    epochs: Positive = Field(3, description="Passes over the conversations, each in a new order.")
    batch: Positive = Field(8, description="Conversations per update.")
    learning_rate: PositiveFloat = Field(5e-3, description="Peak learning rate; other settings are those of optimizer.")
    warmup_updates: int = Field(10, ge=0, description="Updates over which the learning rate rises.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "linear", description="Course of the learning rate after the warm-up, to optimizer.final_factor of the peak."
    )
    every: Positive = Field(50, description="Updates between held-out losses, with a checkpoint at each.")


class WarmUpSection(Section):
    """Supervised warm-up of the tiny model on careless demonstrations."""

    max_updates: int = Field(600, ge=0, description="Most updates of the warm-up.")
    batch: Positive = Field(8, description="Demonstrations per update.")
    options: dict[str, Any] = Field(default_factory=dict, description="Task options, over environment.options.")
    loss_target: PositiveFloat = Field(0.1, description="Smoothed loss of the hardest token at which the warm-up ends.")
    updates_after_target: int = Field(80, ge=0, description="Updates made after the target is reached.")
