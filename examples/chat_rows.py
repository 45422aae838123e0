"""Careless demonstrations, as the lines of OpenAI's chat format that `agentloop sft` reads."""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentloop import Environment, Task
from agentloop.environments.tools.tool_schema import tools_of

CARELESS = 0.35
"""How often one part of a demonstration is another than what is asked."""
Call = tuple[Mapping[str, Any], str]
"""The arguments of a call, and what the tool answered."""


def or_other(right: str, names: Iterable[str], rng: random.Random) -> str:
    """The right one of the names or, carelessly, another."""
    return rng.choice([name for name in names if name != right]) if rng.random() < CARELESS else right


def demonstration(environment: type[Environment], task: Task, calls: Sequence[Call], *, answer: str) -> dict[str, Any]:
    """A conversation that calls the environment's only tool, and ends with an answer."""
    (tool,) = tools_of(environment).values()
    messages: list[dict[str, Any]] = [{"role": said.role, "content": said.content} for said in task.messages()]
    for number, (arguments, result) in enumerate(calls):
        function = {"name": tool.name, "arguments": json.dumps(arguments)}
        call = {"type": "function", "id": str(number), "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": str(number), "content": result})
    return {"messages": [*messages, {"role": "assistant", "content": answer}], "tools": [tool.schema]}


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
