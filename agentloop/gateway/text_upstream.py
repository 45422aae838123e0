"""Replies of another model, asked by text over OpenAI's chat completions: their tokens are those that the policy would
say them with, and have no log-probs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from openai import AsyncOpenAI, OpenAIError
from openai.types.chat import ChatCompletion

from agentloop.errors import one_line
from agentloop.gateway.agent_request import AgentRequest
from agentloop.gateway.http_json import arguments_text
from agentloop.records import Completion, GenerationFailed
from context import Message, Renderer, ToolCall
from context.parse.json_calls import strict_json
from context.parse.reply import Malformed

_LIMITS = ("max_tokens", "max_completion_tokens")


class TextUpstream:
    """A model that its provider serves."""

    def __init__(self, url: str, *, key: str | None, model: str, renderer: Renderer) -> None:
        """`url`: what clients of OpenAI take for their base URL; `renderer`: of the policy that is to imitate it."""
        self._client = AsyncOpenAI(base_url=url, api_key=key or "none")
        self._key, self._model, self._renderer = key, model, renderer

    async def ask(self, request: AgentRequest, line: int, prompt_ids: Sequence[int], most: int) -> Completion:
        """Its reply, in the policy's tokens. Raises GenerationFailed, and RenderError where they can't say it."""
        body: dict[str, Any] = {"messages": [_written(message) for message in request.messages]}
        if request.tools:
            body["tools"] = request.tools
        body |= {name: request.max_tokens for name in _LIMITS if request.body.get(name) is not None}
        try:
            answer = await self._client.chat.completions.create(model=self._model, **body)
        except OpenAIError as error:
            text = one_line(error)
            raise GenerationFailed(text.replace(self._key, "***") if self._key else text) from None
        message, is_cut = _read(answer)
        ids = self._renderer.reply(message)
        ids = ids[:-1] if is_cut and len(ids) > 1 else ids
        return Completion(tuple(ids), (math.nan,) * len(ids), 0)


def _written(message: Message) -> dict[str, Any]:
    row: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        row["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": arguments_text(c.arguments)}}
            for c in message.tool_calls
        ]
    if message.tool_call_id is not None:
        row["tool_call_id"] = message.tool_call_id
    return row


def _read(answer: ChatCompletion) -> tuple[Message, bool]:
    """The reply, and whether it was cut. Thoughts, which most providers keep to themselves, are no part of it."""
    try:
        (choice,) = answer.choices
        calls = [call.function for call in choice.message.tool_calls or () if call.type == "function"]
        found = [ToolCall(call.name, _arguments(call.arguments)) for call in calls]
        message = Message("assistant", choice.message.content or "", tool_calls=tuple(found))
        finish = choice.finish_reason
    except (AttributeError, TypeError, ValueError, Malformed) as error:
        raise GenerationFailed(f"the upstream must give one reply, got {one_line(error)}") from None
    if finish not in ("stop", "tool_calls", "length") or not (message.content or calls):
        raise GenerationFailed(f"the upstream must end a reply that says something, got one that ended by {finish!r}")
    return message, finish == "length"


def _arguments(text: str) -> dict[str, Any]:
    arguments = strict_json(text or "{}")
    if not isinstance(arguments, dict):
        raise TypeError("arguments that are no object")
    return arguments
