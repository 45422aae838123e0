"""Messages of a conversation: who may write them, their form for chat templates and for people, and their hash."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from context.authors import ENV, INITIALIZATION, LLM, USER, AuthorTable
from context.wording import visible_lines

_INDENT = "    "


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]
    id: str | None = None
    """None: the model's format has no ids."""


@dataclass(frozen=True)
class Message:
    role: str
    """As the chat template knows it: system, user, assistant, tool, ..."""
    content: str
    author: str = USER
    """A name of the run's author table."""
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    """The tool that answered; None for other roles."""
    tool_call_id: str | None = None
    reasoning: str | None = None
    """The thinking before `content`, for templates that write thinking apart. None: there was none."""
    note: str = ""
    """A strategy's text below `content`, in this message. Its tokens carry author `memory`."""
    error_kind: str | None = None
    """The kind of failure of the tool call that this message answers. None: it did not fail, or there is no call."""
    reward: float | None = None
    """The reward that the environment gave for this reply as soon as it had seen it. None: it gave none."""


def check_message(message: Any) -> None:
    if not isinstance(message, Message):
        raise ValueError(
            f"messages must hold Message, got {type(message).__name__}. Write Message(role, content), or read "
            "one as OpenAI writes it with read_message."
        )


def admitted(messages: Sequence[Message], authors: AuthorTable, *, opening: bool) -> list[Message]:
    """Messages from outside, each with the author of its tokens.

    An assistant message without an author was not sampled: its author becomes `initialization`. In the `opening` an
    action author may speak in the policy's place. Raises ValueError for an author whose tokens are sampled, because
    sampled tokens are never rendered.
    """
    rows = []
    for message in messages:
        check_message(message)
        if message.role == "assistant" and message.author == USER:  # what a Message says that names no author
            message = replace(message, author=INITIALIZATION)
        author = authors.author(message.author)
        if author.behavior or (author.action and not opening):
            where = "given" if author.behavior else "later"
            raise ValueError(
                f"messages.author must not be one whose tokens are sampled, got {message.author!r} "
                f"for a {where} {message.role} message. Use {INITIALIZATION!r}."
            )
        if author.action and message.role != "assistant":
            raise ValueError(
                f"messages.role must be assistant for author {message.author!r}, who speaks in the policy's place "
                f"(action: true), got {message.role!r}. Change the role, or use an author with action: false."
            )
        rows.append(message)
    return rows


def shown_messages(messages: Sequence[Message], authors: AuthorTable) -> tuple[Message, ...]:
    return tuple(message for message in messages if authors.author(message.author).shown)


Change = Callable[[str], str]
"""Changes a text before a template is given it."""


def to_template(message: Message, leaf: Change = str, word: Change = str) -> dict[str, Any]:
    """The dictionary that a Hugging Face chat template expects. `leaf` changes contents, `word` names and keys.

    A content of white space alone is not changed: templates ask whether a content is empty.
    """
    row: dict[str, Any] = {"role": message.role}
    if message.reasoning is not None:
        row["reasoning_content"] = changed(message.reasoning, leaf, word)
    row["content"] = below(changed(message.content, leaf, word), changed(message.note, leaf, word))
    if message.tool_calls:
        row["tool_calls"] = [_call_to_template(call, leaf, word) for call in message.tool_calls]
    if message.name is not None:
        row["name"] = word(message.name)
    if message.tool_call_id is not None:
        row["tool_call_id"] = word(message.tool_call_id)
    return row


def _call_to_template(call: ToolCall, leaf: Change, word: Change) -> dict[str, Any]:
    function = {"name": word(call.name), "arguments": changed(call.arguments, leaf, word)}
    named = {} if call.id is None else {"id": word(call.id)}  # first, for templates that write a call whole
    return {**named, "type": "function", "function": function}


def changed(value: Any, leaf: Change, word: Change) -> Any:
    """Return a JSON value with every text changed by `leaf` and every key by `word`."""
    if isinstance(value, str):
        return value if not value or value.isspace() else leaf(value)
    if isinstance(value, Mapping):
        return {word(str(key)): changed(child, leaf, word) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [changed(child, leaf, word) for child in value]
    return value


def numbered_calls(calls: Sequence[ToolCall], first: int) -> tuple[ToolCall, ...]:
    """The calls with an id each, for a template that needs ids where the policy's format has none."""
    return tuple(replace(call, id=call.id or f"call{number:05d}") for number, call in enumerate(calls, first))


def calls_named_by_ids(messages: Sequence[Message]) -> list[Message]:
    """The messages with `functions.NAME:0` and so on as the ids of their calls, from which a template reads names.

    A result answers the call with its id in the turn before. A result without an id answers the first call that has
    no result yet.
    """
    named: list[Message] = []
    numbers, waiting = count(), dict[str | None, list[str]]()
    for message in messages:
        if message.tool_calls:
            waiting, calls = {}, []
            for call in message.tool_calls:
                calls.append(replace(call, id=f"functions.{call.name}:{next(numbers)}"))
                waiting.setdefault(call.id, []).append(str(calls[-1].id))
            message = replace(message, tool_calls=tuple(calls))
        elif message.role == "tool" and (ids := waiting.get(message.tool_call_id)):
            message = replace(message, tool_call_id=ids.pop(0))
        named.append(message)
    return named


def plain_message(message: Message) -> dict[str, Any]:
    """The message as pages and programs get it: JSON, whatever a model wrote."""
    calls = [{**vars(call), "arguments": _plain(dict(call.arguments))} for call in message.tool_calls]
    return {**vars(message), "tool_calls": calls}


def _plain(value: Any) -> Any:
    """The value with NaN and Infinity as texts: models write them where numbers belong, and JSON has neither."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def conversation_text(messages: Iterable[Mapping[str, Any]]) -> str:
    """A conversation for a terminal: each `plain_message` as `assistant: ...`, with its calls below.

    An author whom the role does not imply follows it, and the reward of a reply: `assistant (demonstration, reward 1)`.
    """
    return "\n".join(map(_message_text, messages))


USUAL_AUTHORS = {"system": INITIALIZATION, "user": USER, "assistant": LLM, "tool": ENV}


def _message_text(message: Mapping[str, Any]) -> str:
    role, author, reward = message["role"], message["author"], message["reward"]
    facts = [author] if author != USUAL_AUTHORS.get(role) else []
    facts += [] if reward is None else [f"reward {reward:g}"]
    name = f" {message['name']}" if message["name"] else ""
    name += f" ({', '.join(facts)})" if facts else ""
    said = [message["reasoning"] and f"(thinking) {message['reasoning']}", message["content"], message["note"]]
    text = "\n".join(part for part in said if part)
    lines = [f"{role}{name}: {text}".rstrip().replace("\n", f"\n{_INDENT}")]
    for call in message["tool_calls"]:
        given = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call["arguments"].items())
        lines.append(f"{_INDENT}calls {call['name']}({', '.join(given)})")
    return visible_lines("\n".join(lines))


def below(content: str, note: str) -> str:
    return f"{content}\n\n{note}" if note and content else content or note


def canonical_json(value: Any) -> str:
    """One text per value: sorted keys, no spaces, no NaN. The input of every content hash."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def content_hash(value: Any) -> str:
    """The sha256 of the canonical JSON. Lone surrogates hash as themselves."""
    return hashlib.sha256(canonical_json(value).encode("utf-8", "surrogatepass")).hexdigest()


def call_facts(calls: Sequence[ToolCall]) -> str:
    """One text for equal calls, whatever their ids. Empty: there are no calls."""
    return canonical_json([[call.name, _with_whole_numbers(dict(call.arguments))] for call in calls]) if calls else ""


def are_like(given: Sequence[ToolCall], said: Sequence[ToolCall]) -> bool:
    """True if the `given` calls are the policy's calls `said`. Ids and added arguments may differ."""
    cut = [
        replace(one, arguments={name: value for name, value in one.arguments.items() if name in call.arguments})
        for one, call in zip(given, said, strict=False)
    ]
    return len(given) == len(said) and call_facts(cut) == call_facts(said)


def _with_whole_numbers(value: Any) -> Any:
    """The value with whole numbers in one form: programs write 1.0 as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _with_whole_numbers(inner) for name, inner in value.items()}
    return [_with_whole_numbers(inner) for inner in value] if isinstance(value, list) else value


def messages_hash(messages: Sequence[Message]) -> str:
    return content_hash([to_template(message) for message in messages])
