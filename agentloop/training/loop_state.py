"""What a loop remembers from one iteration to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentloop.config.sections.run_section import RunSection
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

    def has_ended(self, run: RunSection) -> bool:
        """Whether no iteration is left, or the success target was reached."""
        last_two = [success for _, success in self.evaluations[-2:]]
        target = run.stop_at_success
        reached = target is not None and len(last_two) == 2 and min(last_two) >= target
        return self.iteration >= run.iterations or reached

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> LoopState:
        evaluations = [(int(i), float(s)) for i, s in values["evaluations"]]
        return cls(**{**values, "evaluations": evaluations, "tasks": TaskQueue.from_values(values["tasks"])})
