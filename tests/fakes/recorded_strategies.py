"""Strategies that remember what they last decided: what the next prompt shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from context import Message
from context.strategies import (
    Arrangement,
    ClipToolResults,
    Hint,
    History,
    Linear,
    LinearThink,
    Memory,
    SelfClip,
    SlidingWindow,
    Strategy,
)

OTHER_TOKENS = "linear_other_tokens"
"""Linear, with replies that are sampled letter by letter."""
STRATEGIES = (
    "linear",
    OTHER_TOKENS,
    "linear_think",
    "sliding_window",
    "clip_tool_results",
    "memory",
    "self_clip",
    "hint",
)


@dataclass
class RecordingStrategy(Strategy):
    """Another strategy, and what it last asked for."""

    strategy: Strategy
    arrangement: Arrangement | None = None
    measured: tuple[Message, ...] | None = None
    """What it measured last, while it was deciding."""
    tools_measured: bool = True

    def arrange(self, history: History) -> Arrangement:
        def measure(messages: Sequence[Message], *, tools: bool = True) -> int:
            self.measured, self.tools_measured = tuple(messages), tools
            return history.measure(messages, tools=tools)

        self.arrangement = self.strategy.arrange(replace(history, measure=measure))
        return self.arrangement

    def hinted(self, opening: Sequence[Message], hint: str | None) -> tuple[Message, ...]:
        return self.strategy.hinted(opening, hint)


def strategy(name: str, budget: int) -> Strategy:
    made: dict[str, Any] = {
        "linear": Linear,
        OTHER_TOKENS: Linear,
        "linear_think": LinearThink,
        "sliding_window": lambda: SlidingWindow(budget),
        "clip_tool_results": lambda: ClipToolResults(budget, keep_chars=1, marker="~"),
        "memory": lambda: Memory(budget, max_summary_tokens=12),
        "self_clip": lambda: SelfClip(budget, max_answer_tokens=200, excerpt_chars=40),
        "hint": Hint,
    }
    found: Strategy = made[name]()
    return found
