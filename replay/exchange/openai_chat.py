"""Conversations as OpenAI's chat format has them, one per line: messages, tools, and log-probs where they were kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, JsonValue

from context.conversation_file import read_message
from context.messages import Message
from context.templates.rendering.contents import with_thought
from replay.exchange.row_format import BadRow, Part, json_line, read_object, typed
from replay.records import Finite


class _Open(Part):
    """May hold more than is looked at."""

    model_config = ConfigDict(extra="allow")


def _joined(content: Any) -> Any:
    """A text, or the texts of its parts."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
        raise ValueError("should be text, without parts of another kind")
    return "".join(map(str, texts))


def _empty(value: Any) -> None:
    if value:
        raise ValueError("should be empty: use tool_calls or content")


def _read(arguments: Any) -> Any:
    """An object, or the text of one."""
    return read_object(arguments) if isinstance(arguments, str) else arguments


def _described(tool: dict[str, JsonValue]) -> dict[str, JsonValue]:
    if not isinstance(tool.get("function", tool), dict):
        raise ValueError("should describe a function by an object")
    return tool


_Nothing = Annotated[Any, AfterValidator(_empty)]
"""A field with a meaning that tokens can't have here."""


class ChatFunction(_Open):
    name: str
    arguments: Annotated[dict[str, JsonValue], BeforeValidator(_read)] = Field(default_factory=dict)


class ChatCall(_Open):
    function: ChatFunction
    id: str | None = None


class TokenLogProb(_Open):
    """One entry of `logprobs.content`."""

    token: str
    logprob: Finite
    codes: Annotated[list[Annotated[int, Field(ge=0, le=255)]], Field(fail_fast=True)] | None = Field(
        None, alias="bytes"
    )

    @property
    def raw(self) -> bytes:
        return self.token.encode("utf-8", "surrogatepass") if self.codes is None else bytes(self.codes)


class ChatLogProbs(_Open):
    content: Annotated[list[TokenLogProb], Field(fail_fast=True)] | None = None


class ChatMessage(_Open):
    role: str
    content: Annotated[str | None, BeforeValidator(_joined)] = None
    tool_calls: Annotated[list[ChatCall], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    weight: Literal[0, 1] = 1
    logprobs: ChatLogProbs | None = None
    function_call: _Nothing = None
    refusal: _Nothing = None
    audio: _Nothing = None


class ChatChoice(_Open):
    message: ChatMessage
    logprobs: ChatLogProbs | None = None


def _one(choices: Any) -> Any:
    if isinstance(choices, list) and len(choices) != 1:
        raise ValueError("should hold one response: write a row per choice")
    return choices


class ChatRow(_Open):
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)]
    tools: (
        Annotated[list[Annotated[dict[str, JsonValue], AfterValidator(_described)]], Field(fail_fast=True)] | None
    ) = None
    choices: Annotated[list[ChatChoice] | None, BeforeValidator(_one)] = None
    reward: Annotated[float, Field(ge=-1e300, le=1e300)] | None = None
    success: bool | None = None


@dataclass(frozen=True)
class TeacherMessage:
    """A message of the file."""

    message: Message
    trained: bool
    """False: `weight` is 0."""
    log_probs: list[TokenLogProb] | None
    """As the file has them; None where it has none."""


@dataclass(frozen=True)
class Conversation:
    opening: tuple[Message, ...]
    """What is there before the first trained reply, examples among it."""
    turns: tuple[tuple[TeacherMessage, tuple[Message, ...]], ...]
    """Each reply with what came back, which is nothing behind the last one alone."""
    tools: list[dict[str, Any]]
    task: str
    """The first message of a user's."""
    reward: float | None
    success: bool | None


def read_line(line: bytes, ignored: Counter[str]) -> Conversation:
    """Raises BadRow. `ignored` counts fields that are not looked at."""
    row = typed(ChatRow, json_line(line))
    ignored.update((row.model_extra or {}).keys())
    entries = [_entry(given, given.logprobs, ignored) for given in row.messages]
    # The message of a response that stands beside its request.
    entries += [_entry(given.message, given.message.logprobs or given.logprobs, ignored) for given in row.choices or ()]
    replies = [i for i, entry in enumerate(entries) if entry.message.role == "assistant"]
    trained = [i for i in replies if entries[i].trained]
    if row.choices and row.messages and row.messages[-1].role == "assistant":
        raise BadRow("choices must answer a message, got one of the assistant's before it. Make one message of both.")
    if not trained or replies[-1] != len(entries) - 1:
        raise BadRow("messages must end in a reply of the assistant, and one of them be trained, got none.")
    task = next((entry.message.content for entry in entries if entry.message.role == "user"), None)
    if task is None:
        raise BadRow("messages must hold one of a user's, got none.")
    opening = tuple(entry.message for entry in entries[: trained[0]])
    return Conversation(opening, _turns(entries[trained[0] :]), row.tools or [], task, row.reward, row.success)


def _turns(entries: Sequence[TeacherMessage]) -> tuple[tuple[TeacherMessage, tuple[Message, ...]], ...]:
    """Of entries that begin with a reply. Messages of the assistant in a row are one."""
    turns: list[tuple[TeacherMessage, tuple[Message, ...]]] = []
    for entry in entries:
        reply, answers = turns[-1] if turns else (entry, ())
        if entry.message.role != "assistant":
            turns[-1] = reply, (*answers, entry.message)
        elif answers or not turns:
            turns.append((entry, ()))
        else:
            turns[-1] = _joined_replies(reply, entry), ()
    return tuple(turns)


def _joined_replies(first: TeacherMessage, second: TeacherMessage) -> TeacherMessage:
    """What a policy would say at once; texts have a line break between them. Raises BadRow where it would be another.

    A reply is its thoughts, then its text, then its calls: what was said in another order is no reply.
    """
    one, other = first.message, second.message
    before, after = ((said.reasoning, said.content, said.tool_calls) for said in (one, other))
    last = max((place for place, part in enumerate(before) if part), default=0)
    thinks_again = any(before) and with_thought(other) is not other
    if any(after[:last]) or thinks_again or first.trained != second.trained or one.name != other.name:
        raise BadRow(
            "messages of the assistant in a row must be one reply: thoughts, then text, then calls, of one name and "
            "weight, got others. Put what was answered between them, or make one message of them."
        )
    reasoning, content = ("\n".join(filter(None, texts)) for texts in zip(before[:2], after[:2], strict=True))
    message = replace(
        one, reasoning=reasoning or None, content=content, tool_calls=(*one.tool_calls, *other.tool_calls)
    )
    return replace(first, message=message, log_probs=[*(first.log_probs or ()), *(second.log_probs or ())] or None)


def _entry(given: ChatMessage, log_probs: ChatLogProbs | None, ignored: Counter[str]) -> TeacherMessage:
    ignored.update(f"messages.{name}" for name in given.model_extra or ())
    known = given.model_dump(include=ChatMessage.model_fields.keys() - {"logprobs"})
    content = log_probs.content if log_probs is not None else None
    return TeacherMessage(read_message(0, known), bool(given.weight), content or None)
