"""Records of episodes: how much of what tools are asked has been asked before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentloop.rollouts.trajectories import repeated_calls
from context.messages import Message, ToolCall
from replay.records import Trajectory
from tests.fakes.records import trajectory


def row(task: str, *turns: Sequence[int]) -> Trajectory:
    """One that made these calls, reply by reply."""
    messages = [Message("user", "go")]
    for turn in turns:
        calls = tuple(ToolCall("look", {"n": n}) for n in turn)
        messages.append(Message("assistant", "", author="llm", tool_calls=calls))
        messages += [Message("tool", "x", author="env", name="look") for _ in turn]
    made = trajectory("id")
    return replace(made, record=replace(made.record, task=task), messages=tuple(messages))


def test_a_call_is_repeated_after_the_same_calls_of_the_same_task() -> None:
    # Of six calls 1, 1-2, 1-3 and, of the other task, 1 are new.
    assert repeated_calls([row("a", [1], [2]), row("a", [1], [3]), row("b", [1]), row("a", [1])]) == 1 - 4 / 6
    # Calls of one reply follow each other.
    assert repeated_calls([row("a", [1, 2]), row("a", [1], [2])]) == 0.5
    assert repeated_calls([row("a", [1, 2]), row("a", [2, 1])]) == 0.0
    assert repeated_calls([]) is None
    assert repeated_calls([row("a")]) is None
