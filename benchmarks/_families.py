"""The families of tasks on which replay is measured with the pretrained model."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Family(NamedTuple):
    module: str
    """Writes demonstrations.jsonl, train.jsonl and, of kinds that nothing is learned on, test.jsonl into a folder."""
    words: tuple[object, ...]
    environment: str
    max_tokens: int
    of_data: Callable[[Path], Mapping[str, Any]]
    """Settings of its runs over those of the calculator, by where its data are."""
    without: tuple[str, ...]
    """Arms that it cannot have: hindsight, without an `achieved`."""
    found: tuple[int, float] | None
    """Epochs and learning rate that the control was tuned to, and every arm has; None: it is not tuned yet."""


FAMILIES = {
    "calculator": Family(
        module="examples.calculator_agent.make_data",
        words=("--tasks", 4000, "--careless", 0.85),  # one episode in five succeeds at the start
        environment="examples/calculator_agent/agent.py:CalculatorAgent",
        max_tokens=512,
        of_data=lambda data: {},
        without=("hindsight",),
        found=(2, 2e-5),
    ),
    "lookups": Family(
        module="benchmarks._lookup_rows",
        words=(),
        environment="benchmarks/_lookup_rows.py:LookupRows",
        max_tokens=768,
        of_data=lambda data: {"rollout.max_turns": 9},
        without=(),
        found=None,
    ),
    "sql": Family(
        module="examples.sql_agent.make_data",
        words=("--demonstrations", 384),
        environment="examples/sql_agent/agent.py:SqlAgent",
        max_tokens=768,
        of_data=lambda data: {
            "environment.options": {"folder": str(data / "databases")},
            "rollout.max_turns": 5,
            "rollout.max_tokens_per_turn": 96,
        },
        without=("hindsight",),
        found=None,
    ),
}
