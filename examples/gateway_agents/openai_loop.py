"""An agent as people write them: OpenAI's client in a loop. A function, and a program of the same."""

import json
import os
import sys
from typing import Any

from openai import OpenAI

MOST_TURNS = 12
LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up the record of a key.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """1 if the answer is the right one."""
    messages: list[Any] = [
        {"role": "system", "content": task["system"]},
        {"role": "user", "content": task["prompt"]},
    ]
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(MOST_TURNS):
            reply = client.chat.completions.create(model="policy", messages=messages, tools=[LOOKUP]).choices[0].message
            if not reply.tool_calls:
                return float(reply.content == task["answer"])
            messages.append(reply.model_dump(exclude_none=True))
            for call in reply.tool_calls:
                key = str(json.loads(call.function.arguments).get("key"))
                record = task["store"].get(key, {"error": "unknown key"})
                messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(record)})
    return 0.0


if __name__ == "__main__":
    given = json.loads(sys.stdin.readline())
    reward = solve(given, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    print(json.dumps({"reward": reward}))
