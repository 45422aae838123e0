"""OpenAI's responses. The gateway keeps no state for them: each request has the whole conversation, as items.

Thinking is the summary of a reasoning item, which clients send back.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from openai.types import responses as types
from pydantic import BaseModel

from agentloop.gateway.agent_request import AgentReply, AgentRequest, BadRequest, FindReply
from agentloop.gateway.http_json import arguments_text, event_type, openai_error, sse, to_json
from agentloop.gateway.request_fields import agent_request, read_blocks, read_list, read_name, read_tool, wrong

PING = b": ping\n\n"
_ASSISTANT = ("reasoning", "message", "function_call")
"""The kinds of item in one reply, in their order. A reply may have several calls."""
_SEARCH = "web_search"
_ITEM_ID = re.compile(r"(?:rs|msg)_(.{1,40})|fc_(.{1,40})_[0-9]+")


def read(body: Mapping[str, Any], find_reply: FindReply) -> AgentRequest:
    rows = _rows(body.get("instructions"), body.get("input"), lambda id: _find_item(id, find_reply, body.get("tools")))
    offered = body.get("tools")
    tools = [tool for tool, _ in _tools("tools", offered)]
    if len({tool["function"]["name"] for tool in tools}) < len(tools):
        raise wrong(
            "tools", "functions of different names, in whatever namespaces", [tool["function"] for tool in tools]
        )
    others = ["input", "instructions"]
    request = agent_request(body, rows, tools, limits=["max_output_tokens"], read=others, field="input")
    searches = any(tool["type"] == _SEARCH for tool in offered or [])
    return replace(request, overruled=(*request.overruled, f"tools.{_SEARCH}")) if searches else request


def _tools(field: str, given: Any, namespace: str | None = None) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Read the functions, each with its namespace. The provider's own web search is left out: no policy has it."""
    for index, tool in enumerate(read_list(field, given)):
        where, kind = f"{field}[{index}]", tool.get("type") if isinstance(tool, dict) else None
        if kind == "namespace" and namespace is None:
            name = read_name(f"{where}.name", tool.get("name"))
            yield from _tools(f"{where}.tools", tool.get("tools"), name)
        elif kind != _SEARCH:
            yield read_tool(where, tool, ["function"]), namespace


def _find_item(id: Any, find_reply: FindReply, tools: Any) -> dict[str, Any] | None:
    """Find the item of a delivered reply by the item's id; None where there is none."""
    found = _ITEM_ID.fullmatch(id) if isinstance(id, str) else None
    reply = found and find_reply(found[1] or found[2])
    return next((item for item in _items(reply, tools) if item["id"] == id), None) if reply else None


def _rows(
    instructions: Any, given: Any, find_item: Callable[[Any], dict[str, Any] | None]
) -> list[tuple[int, dict[str, Any]]]:
    """Write the input as messages of chat completions; a reply's items become one. `find_item` reads references."""
    if instructions is not None and not isinstance(instructions, str):
        raise wrong("instructions", "text", instructions)
    rows: list[tuple[int, dict[str, Any]]] = []
    if instructions:
        rows.append((0, {"role": "system", "content": instructions}))
    items = [{"role": "user", "content": given}] if isinstance(given, str) else read_list("input", given)
    last = -1
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise wrong(where, "an object", item)
        if item.get("type") == "item_reference":
            referred = find_item(item.get("id"))
            if referred is None:
                raise wrong(f"{where}.id", "that of an item of a reply that this session was given", item.get("id"))
            item = referred
        kind = item.get("type", "message")
        if kind == "function_call_output":
            row, place = {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}, -1
        elif kind == "message" and item.get("role") != "assistant":
            row, place = item, -1
        elif kind in _ASSISTANT:
            row, place = _part(where, kind, item), _ASSISTANT.index(kind)
        else:
            raise wrong(f"{where}.type", "message, reasoning, function_call or function_call_output", kind)
        if 0 <= last < place:
            rows[-1][1].update(row)
        elif last == place == _ASSISTANT.index("function_call"):
            rows[-1][1]["tool_calls"] += row["tool_calls"]
        else:
            rows.append((index, {**row, "role": "assistant"} if place >= 0 else row))
        last = place
    return rows


def _part(where: str, kind: str, item: Mapping[str, Any]) -> dict[str, Any]:
    """Write an item of a reply as fields of its message."""
    if kind == "message":
        return {"content": item.get("content")}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        return {"tool_calls": [{"id": item.get("call_id"), "function": function}]}
    parts = read_blocks(f"{where}.content", item.get("content")) or read_blocks(f"{where}.summary", item.get("summary"))
    if not all(isinstance(part.get("text"), str) for part in parts):
        raise wrong(where, "of text parts", parts)
    return {"reasoning_content": "".join(part["text"] for part in parts) or None}


def answer(request: AgentRequest, reply: AgentReply) -> dict[str, Any]:
    usage = {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": reply.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }
    ended: dict[str, Any] = {"status": "completed", "incomplete_details": None}
    if reply.finish == "length":
        ended = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return _response(request, reply, **ended, output=_items(reply, request.body.get("tools")), usage=usage)


def _response(request: AgentRequest, reply: AgentReply, **fields: Any) -> dict[str, Any]:
    kind = {"type": "function", "parameters": None, "strict": False}
    head = {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "model": request.model,
        "error": None,
        "instructions": request.body.get("instructions"),
        "parallel_tool_calls": True,
        "tool_choice": "auto" if request.tools else "none",
        "tools": [{**kind, **tool["function"]} for tool in request.tools],
        "previous_response_id": None,
    }
    return to_json(types.Response, {**head, **fields})


def _items(reply: AgentReply, tools: Any) -> list[dict[str, Any]]:
    message = reply.message
    status = "incomplete" if reply.finish == "length" else "completed"
    items: list[dict[str, Any]] = []
    if message.reasoning:
        summary = [{"type": "summary_text", "text": message.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{reply.id}", "summary": summary})
    if message.content or not message.tool_calls:
        content = [{"type": "output_text", "text": message.content, "annotations": []}]
        message_item = {"role": "assistant", "content": content, "status": status}
        items.append({"type": "message", "id": f"msg_{reply.id}", **message_item})
    namespaces = {tool["function"]["name"]: space for tool, space in _tools("tools", tools)}
    for place, call in enumerate(message.tool_calls):
        called = {"call_id": call.id, "name": call.name, "arguments": arguments_text(call.arguments)}
        if namespaces.get(call.name):
            called["namespace"] = namespaces[call.name]
        items.append({"type": "function_call", "id": f"fc_{reply.id}_{place}", **called, "status": "completed"})
    return items


def events(request: AgentRequest, reply: AgentReply) -> Iterator[bytes]:
    begun = _response(request, reply, status="in_progress", output=[])
    response = answer(request, reply)
    steps: list[tuple[type[BaseModel], dict[str, Any]]] = [
        (types.ResponseCreatedEvent, {"response": begun}),
        (types.ResponseInProgressEvent, {"response": begun}),
    ]
    for index, item in enumerate(response["output"]):
        steps += _item_steps(item, {"output_index": index, "item_id": item["id"]})
    ended = types.ResponseIncompleteEvent if reply.finish == "length" else types.ResponseCompletedEvent
    steps.append((ended, {"response": response}))
    for number, (event, fields) in enumerate(steps):
        kind = event_type(event)
        yield sse(to_json(event, {"type": kind, "sequence_number": number, **fields}), kind)


def _item_steps(item: dict[str, Any], place: dict[str, Any]) -> list[tuple[type[BaseModel], dict[str, Any]]]:
    """Return the events that send an item piece by piece."""
    if item["type"] == "function_call":
        start = {**item, "arguments": "", "status": "in_progress"}
        steps: list[tuple[type[BaseModel], dict[str, Any]]] = [
            (types.ResponseFunctionCallArgumentsDeltaEvent, {**place, "delta": item["arguments"]}),
            (types.ResponseFunctionCallArgumentsDoneEvent, {**place, "arguments": item["arguments"]}),
        ]
    elif item["type"] == "message":
        start, part = {**item, "content": [], "status": "in_progress"}, item["content"][0]
        at = {**place, "content_index": 0}
        steps = [
            (types.ResponseContentPartAddedEvent, {**at, "part": {**part, "text": ""}}),
            (types.ResponseTextDeltaEvent, {**at, "delta": part["text"], "logprobs": []}),
            (types.ResponseTextDoneEvent, {**at, "text": part["text"], "logprobs": []}),
            (types.ResponseContentPartDoneEvent, {**at, "part": part}),
        ]
    else:
        start, part = {**item, "summary": []}, item["summary"][0]
        at = {**place, "summary_index": 0}
        steps = [
            (types.ResponseReasoningSummaryPartAddedEvent, {**at, "part": {**part, "text": ""}}),
            (types.ResponseReasoningSummaryTextDeltaEvent, {**at, "delta": part["text"]}),
            (types.ResponseReasoningSummaryTextDoneEvent, {**at, "text": part["text"]}),
            (types.ResponseReasoningSummaryPartDoneEvent, {**at, "part": part}),
        ]
    where = {"output_index": place["output_index"]}
    added = (types.ResponseOutputItemAddedEvent, {**where, "item": start})
    return [added, *steps, (types.ResponseOutputItemDoneEvent, {**where, "item": item})]


def error_event(bad: BadRequest) -> bytes:
    event = {"type": "error", "sequence_number": 0, "message": str(bad), "code": bad.code, "param": bad.field}
    return sse({**to_json(types.ResponseErrorEvent, event), **openai_error(bad)}, "error")
