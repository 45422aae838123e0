"""Agents that do what people's programs were seen to do with a conversation: each session from its own seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from context import Message, ToolCall

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} a record",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}, "depth": {"type": "integer"}}},
        },
    }
    for name in ("lookup", "search")
]


@dataclass
class RandomAgent:
    """Keeps some conversations, and changes them the way that programs do between two requests."""

    rng: random.Random
    conversations: list[list[Message]] = field(default_factory=list)

    def request(self) -> tuple[list[Message], list[dict[str, object]], int]:
        """Messages, tools, and which conversation they are of."""
        rng = self.rng
        if not self.conversations or rng.random() < 0.08:  # another agent, or a title
            system = rng.choice(["You look things up.", "You plan.", "Say a title."])
            opening = [Message("system", system), Message("user", rng.choice(["Find pearl.", "Find coral."]))]
            if rng.random() < 0.2:  # an example that nobody sampled
                opening += [Message("assistant", "For example so."), Message("user", "Go on.")]
            self.conversations.append(opening)
        number = rng.randrange(len(self.conversations))
        said = self.conversations[number]
        if said[-1].role == "assistant":
            self._go_on(said)
        if rng.random() < 0.1:
            self._tamper(said)
        tools = [] if rng.random() < 0.04 else TOOLS
        return list(said), tools, number

    def _go_on(self, said: list[Message]) -> None:
        calls = said[-1].tool_calls
        results = [Message("tool", self.rng.choice(["78", '{"next": "arrow"}', ""]), tool_call_id=c.id) for c in calls]
        if len(results) > 1 and self.rng.random() < 0.3:
            self.rng.shuffle(results)
        said += results or [Message("user", self.rng.choice(["And then?", "Go on.", "Are you sure?"]))]

    def _tamper(self, said: list[Message]) -> None:
        way = self.rng.choice(["edit", "inject", "strip", "compact", "back", "reorder"])
        ours = [at for at, message in enumerate(said) if message.role == "assistant"]
        if way == "edit":
            at = self.rng.choice([at for at, message in enumerate(said) if message.role == "user"])
            said[at] = replace(said[at], content=said[at].content + " (edited)")
        elif way == "inject":
            said += [Message("assistant", "Let me think."), Message("user", "Yes.")]
        elif way == "strip" and ours:
            said[ours[-1]] = replace(said[ours[-1]], reasoning=None)
        elif way == "compact":
            said[1:] = [Message("user", "So far: nothing was found. Go on.")]
        elif way == "back" and len(ours) > 1:
            del said[ours[-1] :]
        elif way == "reorder" and ours:
            calls = [
                replace(call, arguments=dict(reversed(list(call.arguments.items())))) for call in said[ours[-1]].tool_calls
            ]
            said[ours[-1]] = replace(said[ours[-1]], tool_calls=tuple(calls))


def random_reply(rng: random.Random, call: str) -> tuple[str, bool]:
    """What a policy may say, and whether it comes to its end; `call` spells a call in the model's format."""
    thought = rng.choice(["", "", "<think>\nhm, pearl\n</think>\n\n"])
    said = rng.choice([call, f"{call}\n{call}", "The code is 78.", "I look. " + call, '<tool_call>{"oops', " spaced  out ", ""])
    return thought + said, rng.random() > 0.05
