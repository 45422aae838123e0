"""Strategies decide what the next prompt shows of a conversation. `STRATEGIES` names them all."""

from context.strategies.model_questions import Memory, SelfClip
from context.strategies.protocol import CONTEXT_FULL, SUMMARY_TOO_LONG, Strategy
from context.strategies.rules import ClipToolResults, Hint, Linear, LinearThink, SlidingWindow

STRATEGIES: dict[str, type[Strategy]] = {
    "linear": Linear,
    "linear_think": LinearThink,
    "sliding_window": SlidingWindow,
    "clip_tool_results": ClipToolResults,
    "self_clip": SelfClip,
    "memory": Memory,
    "hint": Hint,
}

__all__ = [
    "CONTEXT_FULL",
    "STRATEGIES",
    "SUMMARY_TOO_LONG",
    "ClipToolResults",
    "Hint",
    "Linear",
    "LinearThink",
    "Memory",
    "SelfClip",
    "SlidingWindow",
    "Strategy",
]
