"""An agent as people write them: OpenAI's client in a loop. Called with a task's file, or imported."""

import json
import os
import sys
from typing import Any

from openai import OpenAI

TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}]


def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """1 if the last answer holds the code."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    while True:
        reply = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        if not reply.tool_calls:
            return float(task["code"] in (reply.content or ""))
        for call in reply.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": task["code"]})


if __name__ == "__main__":
    given = json.loads(sys.stdin.readline())
    reward = solve(given, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    print(json.dumps({"reward": reward}))
