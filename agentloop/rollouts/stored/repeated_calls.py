"""How much of what tools are asked has been asked before."""

from __future__ import annotations

from collections.abc import Sequence

from context.authors import LLM
from context.messages import canonical_json
from replay.records import Trajectory


def repeated_calls(rows: Sequence[Trajectory]) -> float | None:
    """The share of the policy's tool calls that some row of the same task made before, after the same calls.

    None: no row has messages with calls in them.
    """
    made, seen = 0, set[tuple[str, ...]]()
    for row in rows:
        history: tuple[str, ...] = (row.record.task,)
        for call in (call for message in row.messages if message.author == LLM for call in message.tool_calls):
            arguments = {name: repr(value) for name, value in call.arguments.items()}
            history = (*history, canonical_json([call.name, arguments]))
            made += 1
            seen.add(history)
    return 1.0 - len(seen) / made if made else None
