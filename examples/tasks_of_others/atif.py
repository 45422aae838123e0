"""Harbor's trajectories (ATIF) to conversations and back.

`atif.py read chats.jsonl trajectory.json ...` for `agentloop replay import --format openai-chat`, or `atif.py write
chats.jsonl FOLDER` of what `agentloop replay demonstrations` wrote. Rewards stand in `extra`.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read(trajectory: Mapping[str, Any]) -> dict[str, Any]:
    """A conversation."""
    messages: list[dict[str, Any]] = []
    for step in trajectory["steps"]:
        messages.append({"role": step["source"].replace("agent", "assistant"), "content": _text(step["message"])})
        if step["source"] == "agent":
            messages[-1] |= {key: step[key] for key in ("reasoning_content",) if step.get(key)}
            messages[-1]["weight"] = int(not step.get("is_copied_context") and step.get("llm_call_count") != 0)
            calls = [
                (one["tool_call_id"], one["function_name"], one["arguments"]) for one in step.get("tool_calls") or []
            ]
            messages[-1]["tool_calls"] = [{"id": i, "function": {"name": n, "arguments": a}} for i, n, a in calls]
        for result in (step.get("observation") or {}).get("results", []):
            call, said = result.get("source_call_id"), {"content": _text(result.get("content") or "")}
            messages.append({"role": "tool", "tool_call_id": call, **said} if call else {"role": "user", **said})
    while messages and messages[-1]["role"] != "assistant":  # nothing is learned behind the last reply
        messages.pop()
    extra = trajectory.get("extra") or {}
    outcome = {name: extra[name] for name in ("reward", "success") if name in extra}
    return {"messages": messages, "tools": trajectory["agent"].get("tool_definitions") or [], **outcome}


def _text(content: Any) -> str:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if any(part["type"] != "text" for part in parts):
        raise ValueError("A trajectory must hold text alone, got another content.")
    return "".join(part["text"] for part in parts)


def write(conversation: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The trajectory of a conversation; it has no tokens."""
    steps: list[dict[str, Any]] = []
    for row in conversation["messages"]:
        if row["role"] == "tool":
            results = steps[-1].setdefault("observation", {"results": []})["results"]
            call = row.get("tool_call_id") or steps[-1]["tool_calls"][len(results)]["tool_call_id"]
            results.append({"source_call_id": call, "content": row["content"]})
            continue
        steps.append({"step_id": len(steps) + 1, "source": row["role"].replace("assistant", "agent")})
        steps[-1] |= {"message": row["content"]} | ({"is_copied_context": True} if row.get("weight") == 0 else {})
        steps[-1] |= {key: row[key] for key in ("reasoning_content",) if row.get(key)}
        for place, call in enumerate(row.get("tool_calls", [])):
            named = {"function_name": call["function"]["name"], "arguments": call["function"]["arguments"]}
            id = call.get("id") or f"call_{len(steps)}_{place}"
            steps[-1].setdefault("tool_calls", []).append({"tool_call_id": id, **named})
    agent = {"name": "agentloop", "version": "1", "tool_definitions": conversation["tools"]}
    outcome = {key: conversation[key] for key in ("reward", "success")}
    return {"schema_version": "ATIF-v1.7", "trajectory_id": name, "agent": agent, "steps": steps, "extra": outcome}


if __name__ == "__main__":
    way, chats, *files = sys.argv[1:]
    if way == "read":
        rows = [json.dumps(read(json.loads(Path(file).read_text()))) for file in files]
        Path(chats).write_text("".join(f"{row}\n" for row in rows))
    else:
        for number, line in enumerate(Path(chats).read_text().splitlines(), 1):
            trajectory = write(json.loads(line), f"trajectory-{number}")
            (Path(files[0]) / f"trajectory-{number}.json").write_text(json.dumps(trajectory, indent=1))
