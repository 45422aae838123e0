"""What the configuration says about the run itself: its folder, its checkpoints and its metrics."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from replay.config import RunLength
from replay.setting_types import Fraction, Positive, Section


class RunSection(RunLength, Section):
    name: str = Field("run", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="Name of the run, and of its folder.")
    folder: str = Field("runs", description="Where run folders are made: <folder>/<name>-001, -002, ...")
    threads: Positive = Field(1, description="CPU threads torch may use. One is fastest for tiny models.")
    stop_at_success: Fraction | None = Field(
        None, description="End early once held-out success reaches this in two evaluations in a row; null: never."
    )


class CheckpointSection(Section):
    every: Positive = Field(5, description="Iterations between full checkpoints (weights, optimizer, random states).")
    keep: Positive = Field(2, description="Full checkpoints kept.")
    keep_policies: Positive | Literal["all", "none"] = Field(
        "none", description="Policy snapshots (weights only) kept, one per publish; needed to verify stored log-probs."
    )


class MetricsSection(Section):
    sinks: tuple[str, ...] = Field(
        (),
        description="Besides the database and metrics.jsonl: tensorboard, wandb, trackio, or "
        "`path/to/file.py:ClassName` of your own; see docs/data.md.",
    )
