"""The same with Anthropic's client."""

import json
from typing import Any

from anthropic import Anthropic

MOST_TURNS = 12
LOOKUP: Any = {
    "name": "lookup",
    "description": "Look up the record of a key.",
    "input_schema": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
}


def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """1 if the answer is the right one."""
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    asked: dict[str, Any] = {"model": "policy", "max_tokens": 200, "system": task["system"], "tools": [LOOKUP]}
    with Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as client:
        for _ in range(MOST_TURNS):
            reply = client.messages.create(messages=messages, **asked)
            calls = [block for block in reply.content if block.type == "tool_use"]
            if not calls:
                answer = "".join(block.text for block in reply.content if block.type == "text")
                return float(answer == task["answer"])
            messages.append({"role": "assistant", "content": reply.content})
            messages.append({"role": "user", "content": [_result(call, task["store"]) for call in calls]})
    return 0.0


def _result(call: Any, store: dict[str, Any]) -> dict[str, Any]:
    record = store.get(str(call.input.get("key")), {"error": "unknown key"})
    return {"type": "tool_result", "tool_use_id": call.id, "content": json.dumps(record)}
