"""Official clients that say what random agents say, over HTTP, streamed or whole: each protocol by its own types."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import anthropic
import openai

from context import Message, ToolCall

Answer = tuple[str, Message]
"""The id of a reply, and what its client was given."""


def _function(call: ToolCall) -> dict[str, Any]:
    return {"name": call.name, "arguments": json.dumps(call.arguments)}


def _chat_row(message: Message) -> dict[str, Any]:
    row: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        row["tool_calls"] = [{"id": c.id, "type": "function", "function": _function(c)} for c in message.tool_calls]
    extra = {"reasoning_content": message.reasoning, "tool_call_id": message.tool_call_id}
    return row | {name: value for name, value in extra.items() if value is not None}


def _items(message: Message) -> list[dict[str, Any]]:
    if message.role == "tool":
        return [{"type": "function_call_output", "call_id": message.tool_call_id, "output": message.content}]
    items: list[dict[str, Any]] = []
    if message.reasoning:
        items.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": message.reasoning}]})
    if message.content or not message.tool_calls:
        items.append({"role": message.role, "content": message.content})
    return items + [{"type": "function_call", "call_id": c.id, **_function(c)} for c in message.tool_calls]


def _blocks(message: Message) -> dict[str, Any]:
    if message.role == "tool":
        block = {"type": "tool_result", "tool_use_id": message.tool_call_id, "content": message.content}
        return {"role": "user", "content": [block]}
    blocks: list[dict[str, Any]] = [{"type": "text", "text": message.content}]
    if message.reasoning:
        blocks.insert(0, {"type": "thinking", "thinking": message.reasoning, "signature": "unsigned"})
    blocks += [{"type": "tool_use", "id": c.id, "name": c.name, "input": c.arguments} for c in message.tool_calls]
    return {"role": message.role, "content": blocks}


class RandomClients:
    """The clients of one episode; each request is told apart by `number`, which its metadata hold."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        options: dict[str, Any] = {
            "api_key": key,
            "max_retries": 0,
            "timeout": 120.0,
            "_strict_response_validation": True,
        }
        self._openai = openai.AsyncOpenAI(base_url=f"{url}/v1", **options)
        self._anthropic = anthropic.AsyncAnthropic(base_url=url, **options)
        self.asks: Sequence[Callable[..., Any]] = (self._chat, self._responses, self._messages)

    async def end(self) -> None:
        """Of the episode, which is rewarded."""
        rewarded = self._openai.with_options(base_url=self._url)
        await rewarded.post("/reward", cast_to=object, body={"reward": 1.0, "end": True})
        await self._openai.close()
        await self._anthropic.close()

    async def settled(self) -> None:
        """The server has seen all that happened before."""
        await self._openai.models.list()

    async def _chat(self, said: Sequence[Message], tools: Any, model: str, number: str, *, stream: bool) -> Answer:
        completions = self._openai.chat.completions
        asked: Any = {"model": model, "messages": [_chat_row(m) for m in said], "tools": tools}
        asked["metadata"] = {"number": number}
        if stream:
            async with completions.stream(**asked) as events:
                try:
                    done: Any = await events.get_final_completion()
                except openai.LengthFinishReasonError as cut:
                    done = cut.completion
        else:
            done = await completions.create(**asked)
        message = done.choices[0].message
        calls = [(c.function.name, json.loads(c.function.arguments), c.id) for c in message.tool_calls or ()]
        return done.id, _said(message.content, calls, getattr(message, "reasoning_content", None))

    async def _responses(self, said: Sequence[Message], tools: Any, model: str, number: str, *, stream: bool) -> Answer:
        flat = [{"type": "function", "strict": False, **tool["function"]} for tool in tools]
        asked: Any = {"model": model, "input": [item for m in said for item in _items(m)], "tools": flat}
        asked["metadata"] = {"number": number}
        if stream:
            async with self._openai.responses.stream(**asked) as events:
                done: Any = [event async for event in events][-1].response
        else:
            done = await self._openai.responses.create(**asked)
        by: dict[str, list[Any]] = {"reasoning": [], "message": [], "function_call": []}
        for item in done.output:
            by[item.type].append(item)
        calls = [(item.name, json.loads(item.arguments), item.call_id) for item in by["function_call"]]
        thoughts = "".join(part.text for item in by["reasoning"] for part in item.summary)
        return done.id, _said(done.output_text, calls, thoughts)

    async def _messages(self, said: Sequence[Message], tools: Any, model: str, number: str, *, stream: bool) -> Answer:
        functions = [tool["function"] for tool in tools]
        named = [{"name": f["name"], "description": f["description"]} for f in functions]
        schemas = [{**n, "input_schema": f["parameters"]} for n, f in zip(named, functions, strict=True)]
        asked: Any = {"model": model, "system": said[0].content, "messages": [_blocks(m) for m in said[1:]]}
        asked |= {"tools": schemas, "max_tokens": 4000, "metadata": {"user_id": number}}
        if stream:
            async with self._anthropic.messages.stream(**asked) as events:
                done: Any = await events.get_final_message()
        else:
            done = await self._anthropic.messages.create(**asked)
        by: dict[str, list[Any]] = {"thinking": [], "text": [], "tool_use": []}
        for block in done.content:
            by[block.type].append(block)
        calls = [(block.name, block.input, block.id) for block in by["tool_use"]]
        return done.id, _said(
            "".join(block.text for block in by["text"]), calls, "".join(b.thinking for b in by["thinking"])
        )


def _said(content: str | None, calls: Sequence[tuple[str, Any, str]], thought: str | None) -> Message:
    called = tuple(ToolCall(*call) for call in calls)
    return Message("assistant", content or "", "llm", called, reasoning=thought or None)
