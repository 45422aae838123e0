"""Anthropic's protocol: messages, and the count of their tokens."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anthropic import types
from pydantic import BaseModel

from agentloop.gateway.agent_request import AgentReply, AgentRequest, BadRequest, FindReply, NoRoom
from agentloop.gateway.http_json import arguments_text, event_type, sse, to_json
from agentloop.gateway.request_fields import agent_request, read_blocks, read_list, read_tools, wrong

PING = sse({"type": "ping"}, "ping")
_SIGNATURE = "unsigned"
"""Clients leave out thinking that has no signature."""
_FINISH = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}


def read(body: Mapping[str, Any], _: FindReply | None = None) -> AgentRequest:
    given = read_list("messages", body.get("messages"))
    rows = [row for index, message in enumerate(given) for row in _rows(index, message)]
    if rows and body.get("system"):
        rows.insert(0, (0, {"role": "system", "content": _texts("system", body["system"])}))
    tools = read_tools(body.get("tools"), [None, "custom"], "input_schema")
    return agent_request(body, rows, tools, limits=["max_tokens"], read=["system", "stop_sequences"])


def _rows(index: int, message: Any) -> list[tuple[int, dict[str, Any]]]:
    """Write a message in OpenAI's form, where each tool result, and each text between results, is its own message."""
    where = f"messages[{index}]"
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise wrong(f"{where}.role", "user, assistant or system", role)
    rows: list[dict[str, Any]] = []
    turn: dict[str, Any] = {"role": role, "content": "", "tool_calls": []}
    for place, block in enumerate(read_blocks(f"{where}.content", message.get("content"))):
        at, kind = f"{where}.content[{place}]", block["type"]
        if kind == "tool_result" and role == "user":
            content = _texts(f"{at}.content", block.get("content"))
            result = {"tool_call_id": block.get("tool_use_id"), "is_error": block.get("is_error")}
            rows.append({"role": "tool", "content": content, **result})
        elif kind == "text":
            if role == "user" and not (rows and rows[-1]["role"] == "user"):
                rows.append({"role": "user", "content": ""})
            (rows[-1] if role == "user" else turn)["content"] += _text(at, block)
        elif kind == "thinking" and role == "assistant":
            turn["reasoning_content"] = turn.get("reasoning_content", "") + _text(at, block, "thinking")
        elif kind == "tool_use" and role == "assistant":
            if not isinstance(block.get("input"), dict):
                raise wrong(f"{at}.input", "an object", block.get("input"))
            function = {"name": block.get("name"), "arguments": block["input"]}
            turn["tool_calls"].append({"id": block.get("id"), "function": function})
        else:
            raise wrong(f"{at}.type", f"one that {role} messages have here, text or about tools", kind)
    return [(index, row) for row in (rows or [{"role": "user", "content": ""}] if role == "user" else [turn])]


def _texts(field: str, content: Any) -> str:
    return "".join(_text(f"{field}[{index}]", block) for index, block in enumerate(read_blocks(field, content)))


def _text(where: str, block: Mapping[str, Any], kind: str = "text") -> str:
    text = block.get(kind)
    if block["type"] != kind or not isinstance(text, str):
        raise wrong(where, f"a block of {kind}", block)
    return text


def answer(request: AgentRequest, reply: AgentReply) -> dict[str, Any]:
    usage = {
        "input_tokens": reply.prompt_tokens - reply.cached_tokens,
        "cache_read_input_tokens": reply.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": reply.completion_tokens,
    }
    message = {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": _blocks(reply),
        "stop_reason": "stop_sequence" if reply.stop is not None else _FINISH[reply.finish],
        "stop_sequence": reply.stop,
        "usage": usage,
    }
    return to_json(types.Message, message)


def _blocks(reply: AgentReply) -> list[dict[str, Any]]:
    message = reply.message
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": _SIGNATURE})
    if message.content or not message.tool_calls:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)})
    return blocks


def events(request: AgentRequest, reply: AgentReply) -> Iterator[bytes]:
    message = answer(request, reply)
    usage = {**message["usage"], "output_tokens": 0}
    begun = {**message, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield _event(types.RawMessageStartEvent, message=begun)
    for index, block in enumerate(message["content"]):
        empty, deltas = _split_deltas(block)
        yield _event(types.RawContentBlockStartEvent, index=index, content_block=empty)
        for delta in deltas:
            yield _event(types.RawContentBlockDeltaEvent, index=index, delta=delta)
        yield _event(types.RawContentBlockStopEvent, index=index)
    ended = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    yield _event(types.RawMessageDeltaEvent, delta=ended, usage=message["usage"])
    yield _event(types.RawMessageStopEvent)


def _split_deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Split a block into its empty beginning and the deltas that complete it."""
    if block["type"] == "tool_use":
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments_text(block["input"])}]
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    thinking = {"type": "thinking_delta", "thinking": block["thinking"]}
    signature = {"type": "signature_delta", "signature": block["signature"]}
    return {**block, "thinking": "", "signature": ""}, [thinking, signature]


def _event(model: type[BaseModel], **fields: Any) -> bytes:
    kind = event_type(model)
    return sse(to_json(model, {"type": kind, **fields}), kind)


def token_count(tokens: int) -> dict[str, Any]:
    return to_json(types.MessageTokensCount, {"input_tokens": tokens})


def model(name: str) -> dict[str, Any]:
    since = {"created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}
    return to_json(types.ModelInfo, {"type": "model", "id": name, "display_name": name, **since})


def model_list(names: Sequence[str]) -> dict[str, Any]:
    return {"data": [model(name) for name in names], "has_more": False, "first_id": names[0], "last_id": names[-1]}


def error(bad: BadRequest) -> dict[str, Any]:
    message = str(bad)
    if isinstance(bad, NoRoom):
        message = f"prompt is too long: {bad.prompt_tokens} tokens > {bad.limit} maximum"
    elif bad.code == "context_length_exceeded":  # the wording of another model's server
        message = f"prompt is too long: {message}"
    kind = _ERRORS.get(bad.status, "api_error" if bad.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_event(bad: BadRequest) -> bytes:
    return sse(error(bad), "error")
