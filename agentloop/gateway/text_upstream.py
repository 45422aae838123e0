"""Replies of another model, by text over OpenAI's chat completions: the policy's template turns them into tokens, which
have no log-probs."""

import json
import math
from dataclasses import replace
from functools import partial
from typing import Any

from openai import AsyncOpenAI, BadRequestError, OpenAIError

from agentloop.errors import one_line
from agentloop.gateway.agent_request import AgentRequest, BadRequest
from agentloop.gateway.chat_completions import openai_calls
from agentloop.gateway.request_fields import wrong
from agentloop.records import Completion, GenerationFailed
from context import Message, Renderer, RenderError
from context.conversation_file import read_message
from context.conversation_tree import Prompt
from context.messages import calls_named_by_ids
from context.templates.rendering.conversation_writer import Rendering

_WHOLE = {"stop", "tool_calls"}
"""Finish reasons of replies that their model has completed."""


class TextUpstream:
    def __init__(self, url: str, *, key: str | None, model: str, renderer: Renderer) -> None:
        """`url` is the base URL for OpenAI's client; `renderer` is the renderer of the policy that is to imitate it."""
        self._connect = partial(AsyncOpenAI, base_url=url, api_key=key or "none")
        self._client = self._connect()
        self._key, self._model, self._renderer = key, model, renderer

    async def ask(self, request: AgentRequest, conversation: int, prompt: Prompt, most: int) -> Completion:
        """Return its reply in at most `most` of the policy's tokens, without thinking. Raises GenerationFailed."""
        body: dict[str, Any] = {"messages": [_openai_message(message) for message in request.messages]}
        if request.log_probs:
            raise wrong("logprobs", "left out where another model answers by text", True)
        if request.stop:
            body["stop"] = list(request.stop)
        if request.tools:
            body["tools"] = request.tools
        if request.max_tokens is not None:  # under the name that the agent used
            name = "max_completion_tokens"
            body[name if name in request.body else "max_tokens"] = request.max_tokens
        try:
            answer = await self._client.chat.completions.create(model=self._model, **body)
            (choice,) = answer.choices
            if choice.message.refusal or choice.finish_reason not in _WHOLE | {"length"}:
                raise RenderError(choice.message.refusal or f"finish_reason {choice.finish_reason!r}")
            written = choice.message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
            message = read_message(0, written)
            if not (message.content.strip() or message.tool_calls):
                raise RenderError("an empty one")
            *_, message = self._renderer.template.with_call_ids((*prompt.rendering.given, message))
            ids = self._renderer.reply(prompt.rendering, message)
            is_cut = choice.finish_reason == "length" or len(ids) > most
            if message.tool_calls and is_cut:
                raise RenderError("calls that a limit on tokens has cut off")
        except (OpenAIError, RenderError, AttributeError, TypeError, ValueError) as error:
            if isinstance(error, BadRequestError) and error.code == "context_length_exceeded":
                raise BadRequest(400, error.message, "messages", error.code) from None
            raise self._failure(error) from None
        ids = ids[:-1][:most] if is_cut else ids
        return Completion(tuple(ids), (math.nan,) * len(ids), 0)

    async def play(self, prompt: Rendering, most: int, *, temperature: float) -> Completion:
        """Return its reply in an evaluation, where nothing is imitated: a refusal is an answer, and calls that can't be
        read are text. Raises GenerationFailed."""
        body: dict[str, Any] = {"messages": [_openai_message(message) for message in calls_named_by_ids(prompt.given)]}
        body |= {"tools": prompt.tools} if prompt.tools else {}
        body |= {"temperature": temperature} if temperature != 1.0 else {}  # some models take no other than 1
        try:
            async with self._connect() as client:  # each batch of episodes has an event loop of its own
                answer = await client.chat.completions.create(model=self._model, max_completion_tokens=most, **body)
            (choice,) = answer.choices
            is_cut = choice.finish_reason == "length"
            shown = choice.message.content or choice.message.refusal or "..." * is_cut  # no reply is without a token
            message = Message("assistant", shown)
            written = choice.message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
            try:
                message = message if is_cut or not choice.message.tool_calls else read_message(0, written)
            except RenderError:
                message = replace(message, content=message.content + json.dumps(written["tool_calls"]))
            *_, message = self._renderer.template.with_call_ids((*prompt.given, message))
            ids = self._renderer.reply(prompt, message)
        except (OpenAIError, RenderError, AttributeError, TypeError, ValueError) as error:
            raise self._failure(error) from None
        ids = ids[:-1][:most] if is_cut or len(ids) > most else ids
        return Completion(tuple(ids), (math.nan,) * len(ids), 0)

    def _failure(self, error: Exception) -> GenerationFailed:
        text = f"the upstream must give a reply that the model's template can write, got {one_line(error)}"
        return GenerationFailed(text.replace(self._key, "***") if self._key else text)


def _openai_message(message: Message) -> dict[str, Any]:
    is_unasked = message.role == "tool" and message.tool_call_id is None  # it answers a call that nobody could read
    row: dict[str, Any] = {"role": "user" if is_unasked else message.role, "content": message.content}
    if message.tool_calls:
        row["tool_calls"] = openai_calls(message)
    if message.tool_call_id is not None:
        row["tool_call_id"] = message.tool_call_id
    return row
