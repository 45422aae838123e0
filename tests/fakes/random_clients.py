"""Official clients that say what random agents say, over HTTP, streamed or whole: each protocol by its own types."""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import anthropic
import openai

from context import Message
from context.conversation_file import read_message
from context.messages import to_template

Answer = tuple[str, Message]
"""The id of a reply, and what its client was given."""


def _items(message: Message) -> list[dict[str, Any]]:
    if message.role == "tool":
        return [{"type": "function_call_output", "call_id": message.tool_call_id, "output": message.content}]
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": message.reasoning}]}
    said = {"role": message.role, "content": message.content}
    calls = [{"call_id": c.id, "name": c.name, "arguments": json.dumps(c.arguments)} for c in message.tool_calls]
    items = [*([thought] if message.reasoning else []), *([said] if message.content or not calls else [])]
    return [*items, *({"type": "function_call", **call} for call in calls)]


def _blocks(message: Message) -> dict[str, Any]:
    if message.role == "tool":
        block = {"type": "tool_result", "tool_use_id": message.tool_call_id, "content": message.content}
        return {"role": "user", "content": [block]}
    thought = {"type": "thinking", "thinking": message.reasoning, "signature": "unsigned"}
    calls = [{"type": "tool_use", "id": c.id, "name": c.name, "input": c.arguments} for c in message.tool_calls]
    said = [*([thought] if message.reasoning else []), {"type": "text", "text": message.content}, *calls]
    return {"role": message.role, "content": said}


def _read(content: str | None, calls: Sequence[tuple[str, str, Any]], thought: str | None) -> Message:
    rows = [{"id": id, "function": {"name": name, "arguments": given}} for id, name, given in calls]
    row = {"role": "assistant", "content": content, "tool_calls": rows, "reasoning_content": thought or None}
    return read_message(0, row)


class RandomClients:
    """The clients of one episode; each request has a number of its own in its metadata."""

    def __init__(self, url: str, key: str) -> None:
        options: dict[str, Any] = {"max_retries": 0, "timeout": 120.0, "_strict_response_validation": True}
        self._url, self._openai = url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, **options)
        self._anthropic = anthropic.AsyncAnthropic(base_url=url, api_key=key, **options)
        self.asks = (self._chat, self._responses, self._messages)
        self._references: dict[str, list[dict[str, Any]]] = {}
        """By messages that responses have given."""

    async def end(self) -> bool:
        """Of the episode, which is rewarded; whether there was anything to reward."""
        rewarded = self._openai.with_options(base_url=self._url)
        async with self._openai, self._anthropic:
            while True:
                try:
                    await rewarded.post("/reward", cast_to=object, body={"reward": 1.0, "end": True})
                    return True
                except openai.BadRequestError:
                    return False
                except (openai.InternalServerError, openai.APIConnectionError):  # another gateway takes its place
                    continue

    async def settled(self) -> None:
        """The server has seen all that happened before."""
        with suppress(openai.InternalServerError, openai.APIConnectionError):
            await self._openai.models.list()

    async def _chat(self, said: Sequence[Message], tools: Any, *, stream: bool, **given: Any) -> Answer:
        completions, rows = self._openai.chat.completions, [to_template(message) for message in said]
        done: Any
        if stream:
            async with completions.stream(messages=rows, tools=tools, **given) as events:
                try:
                    done = await events.get_final_completion()
                except openai.LengthFinishReasonError as cut:
                    done = cut.completion
        else:
            done = await completions.create(messages=rows, tools=tools, **given)
        message = done.choices[0].message
        calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        return done.id, _read(message.content, calls, getattr(message, "reasoning_content", None))

    async def _responses(self, said: Sequence[Message], tools: Any, *, stream: bool, **given: Any) -> Answer:
        given["tools"] = [{"type": "function", "strict": False, **tool["function"]} for tool in tools]
        given["input"] = [item for m in said for item in self._references.get(str(to_template(m))) or _items(m)]
        done: Any
        if stream:
            async with self._openai.responses.stream(**given) as events:
                done = [event async for event in events][-1].response
        else:
            done = await self._openai.responses.create(**given)
        calls = [(item.call_id, item.name, item.arguments) for item in done.output if item.type == "function_call"]
        thoughts = [part.text for item in done.output if item.type == "reasoning" for part in item.summary]
        message = _read(done.output_text, calls, "".join(thoughts))
        self._references[str(to_template(message))] = [{"type": "item_reference", "id": i.id} for i in done.output]
        return done.id, message

    async def _messages(
        self, said: Sequence[Message], tools: Any, *, stream: bool, metadata: Any, **given: Any
    ) -> Answer:
        shown = [(tool["function"], tool["function"]["parameters"]) for tool in tools]
        given["tools"] = [{"name": f["name"], "description": f["description"], "input_schema": s} for f, s in shown]
        given |= {"system": said[0].content, "messages": [_blocks(message) for message in said[1:]]}
        given |= {"metadata": {"user_id": metadata["number"]}, "max_tokens": 4000}
        done: Any
        if stream:
            async with self._anthropic.messages.stream(**given) as events:
                done = await events.get_final_message()
        else:
            done = await self._anthropic.messages.create(**given)
        calls = [(block.id, block.name, block.input) for block in done.content if block.type == "tool_use"]
        texts = [block.text for block in done.content if block.type == "text"]
        thoughts = [block.thinking for block in done.content if block.type == "thinking"]
        return done.id, _read("".join(texts), calls, "".join(thoughts))
