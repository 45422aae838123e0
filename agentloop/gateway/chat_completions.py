"""OpenAI's chat completions. Thinking is in the field `reasoning_content`, as vLLM and others write it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from agentloop.gateway.agent_request import AgentReply, AgentRequest, BadRequest, FindReply
from agentloop.gateway.http_json import arguments_text, openai_error, sse, to_json
from agentloop.gateway.request_fields import agent_request, read_list, read_tools
from context.messages import Message

PING = b": ping\n\n"


def read(body: Mapping[str, Any], _: FindReply | None = None) -> AgentRequest:
    rows = list(enumerate(read_list("messages", body.get("messages"))))
    tools = read_tools(body.get("tools"), ["function"])
    return agent_request(body, rows, tools, limits=["max_tokens", "max_completion_tokens"], read=["stop", "logprobs"])


def answer(request: AgentRequest, reply: AgentReply) -> dict[str, Any]:
    message = reply.message
    turn: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
    if message.reasoning:
        turn["reasoning_content"] = message.reasoning
    if message.tool_calls:
        turn["content"] = message.content or None
        turn["tool_calls"] = openai_calls(message)
    choice = {"index": 0, "message": turn, "finish_reason": reply.finish, "logprobs": _log_probs(request, reply)}
    return to_json(ChatCompletion, {**_head(request, reply, "chat.completion"), "choices": [choice], **_usage(reply)})


def events(request: AgentRequest, reply: AgentReply) -> Iterator[bytes]:
    message = reply.message
    nothing = None if message.tool_calls and not message.content else ""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": nothing}]
    if message.reasoning:
        deltas.append({"reasoning_content": message.reasoning})
    if message.content:
        deltas.append({"content": message.content})
    deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(openai_calls(message))]
    finishes = [None] * len(deltas) + [reply.finish]
    for delta, finish in zip([*deltas, {}], finishes, strict=True):
        scored = _log_probs(request, reply) if finish else None
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": scored}
        yield _chunk(request, reply, choices=[choice])
    options = request.body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        yield _chunk(request, reply, choices=[], **_usage(reply))
    yield b"data: [DONE]\n\n"


def model(name: str) -> dict[str, Any]:
    return to_json(Model, {"id": name, "object": "model", "created": 0, "owned_by": "agentloop"})


def model_list(names: Sequence[str]) -> dict[str, Any]:
    return {"object": "list", "data": [model(name) for name in names]}


def error_event(bad: BadRequest) -> bytes:
    return sse(openai_error(bad))


def _chunk(request: AgentRequest, reply: AgentReply, **fields: Any) -> bytes:
    return sse(to_json(ChatCompletionChunk, {**_head(request, reply, "chat.completion.chunk"), **fields}))


def _head(request: AgentRequest, reply: AgentReply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": reply.created, "model": request.model}


def openai_calls(message: Message) -> list[dict[str, Any]]:
    functions = [{"name": call.name, "arguments": arguments_text(call.arguments)} for call in message.tool_calls]
    calls = zip(message.tool_calls, functions, strict=True)
    return [{"id": call.id, "type": "function", "function": function} for call, function in calls]


def _log_probs(request: AgentRequest, reply: AgentReply) -> dict[str, Any] | None:
    """Write the log-probs of all sampled tokens, also of a call's and of the end of the turn."""
    if not request.log_probs:
        return None
    rest: dict[str, Any] = {"bytes": None, "top_logprobs": []}
    return {"content": [{"token": text, "logprob": value, **rest} for text, value in reply.log_probs]}


def _usage(reply: AgentReply) -> dict[str, Any]:
    usage = {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }
    return {"usage": usage}
