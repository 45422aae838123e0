"""An agent with a sub-agent and compaction: a lead sends scouts, and goes on from a summary of its conversation."""

import json
from typing import Any

from openai import OpenAI

LEAD, SCOUT = "policy/lead", "policy/scout"
"""Models by which the gateway tells the two apart."""
MOST_SCOUTS = 9
SUMMED_UP_AFTER = 3
"""Scouts after which the lead's conversation is replaced by its summary."""
LEADING = 'Send scouts to keys until one finds a code. Answer: The code is "..".'
SCOUTING = "Look up a key. Say which is next, or the code."
SUM_UP = {"role": "user", "content": "Sum up."}


def _tool(name: str, description: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


SEND = _tool("send", "Send a scout to a key.")
LOOKUP = _tool("lookup", "Look up the record of a key.")


def solve(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """1 if the lead's answer is the right one."""
    opening = [{"role": "system", "content": LEADING}, {"role": "user", "content": task["prompt"]}]
    messages: list[Any] = list(opening)
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        for sent in range(1, MOST_SCOUTS + 1):
            reply = _reply(client, LEAD, messages, SEND)
            if not reply.tool_calls:
                return float(reply.content == task["answer"])
            messages.append(reply.model_dump(exclude_none=True))
            for call in reply.tool_calls:
                found = scout(client, _key(call), task["store"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
            if sent % SUMMED_UP_AFTER == 0:
                summary = _reply(client, LEAD, [*messages, SUM_UP], SEND).content
                messages = [*opening, {"role": "user", "content": summary or ""}]
    return 0.0


def scout(client: OpenAI, key: str, store: dict[str, Any]) -> str:
    """What the sub-agent reports of a key; it looks up at most once."""
    messages: list[Any] = [{"role": "system", "content": SCOUTING}, {"role": "user", "content": f'Look up "{key}".'}]
    reply = _reply(client, SCOUT, messages, LOOKUP)
    if reply.tool_calls:
        messages.append(reply.model_dump(exclude_none=True))
        for call in reply.tool_calls:
            record = json.dumps(store.get(_key(call), {"error": "unknown key"}))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": record})
        reply = _reply(client, SCOUT, messages, LOOKUP)
    return reply.content or ""


def _reply(client: OpenAI, model: str, messages: list[Any], tool: Any) -> Any:
    return client.chat.completions.create(model=model, messages=messages, tools=[tool]).choices[0].message


def _key(call: Any) -> str:
    return str(json.loads(call.function.arguments).get("key"))
