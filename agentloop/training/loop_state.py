"""What a loop remembers from one iteration to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentloop.training.plan import TaskQueue


@dataclass
class LoopState:
    """What the loop itself remembers, as a checkpoint has it; the rest of a checkpoint belongs to its parts."""

    iteration: int = 0
    """Iterations committed."""
    tasks: TaskQueue = field(default_factory=TaskQueue)
    attempt: int = 0
    """Part of the ids of what the loop collects: a resumed run must not reuse those of its orphans."""
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    """(iteration, held-out success), oldest first."""
    training_seconds: float = 0.0
    batches: int = 0
    """Batches of workers that have been learned from: an iteration that replays alone has none."""

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> LoopState:
        evaluations = [(int(i), float(s)) for i, s in values["evaluations"]]
        return cls(**{**values, "evaluations": evaluations, "tasks": TaskQueue.from_values(values["tasks"])})
