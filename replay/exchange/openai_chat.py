"""Conversations as OpenAI's chat format has them, one per line: messages, tools, and log-probs where they were kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from context.conversation_file import read_message
from context.messages import Message
from context.templates.chat_template import RenderError
from replay.exchange.row_format import BadRow
from replay.exchange.strict_json import NotStrict, free_form, loads, shortened

_KNOWN = ("messages", "tools", "choices", "reward", "success")
_OF_MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "weight", "logprobs")
_MUST_BE_EMPTY = ("function_call", "refusal", "audio")
"""Fields with a meaning that tokens can't have here."""


@dataclass(frozen=True)
class TokenLogProb:
    """One entry of `logprobs.content`."""

    token: str
    raw: bytes
    log_prob: float


@dataclass(frozen=True)
class Said:
    """A reply of the teacher's."""

    message: Message
    trained: bool
    """False: `weight` is 0."""
    log_probs: tuple[TokenLogProb, ...] | None
    """As the file has them; None where it has none."""


@dataclass(frozen=True)
class Conversation:
    opening: tuple[Message, ...]
    """What is there before the first trained reply, examples among it."""
    turns: tuple[tuple[Said, tuple[Message, ...]], ...]
    """Each reply with what came back."""
    tools: list[dict[str, Any]]
    task: str
    """The first message of a user's."""
    reward: float | None
    success: bool | None


def read_line(line: bytes, ignored: Counter[str]) -> Conversation:
    """Raises BadRow. `ignored` counts fields that are not looked at."""
    try:
        row = loads(line.decode())
    except UnicodeDecodeError:
        raise BadRow("line must be UTF-8, got other bytes.") from None
    except NotStrict as error:
        raise BadRow(f"line must {error}.") from None
    given = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(given, list) or not given:
        raise BadRow(f"row must hold a list of messages, got {shortened(given)}.")
    ignored.update(name for name in row if name not in _KNOWN)
    tools = row.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(f"tools must be a list of objects, got {shortened(tools)}.")
    entries = [_entry(f"messages[{i}]", value, ignored) for i, value in enumerate([*given, *_chosen(row)])]
    return _conversation(entries, tools, _number(row, "reward"), _flag(row, "success"))


def _chosen(row: Mapping[str, Any]) -> list[Any]:
    """The message of a response that stands beside its request."""
    choices = row.get("choices")
    if choices is None:
        return []
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise BadRow(f"choices must hold one response, got {shortened(choices)}. Write a row per choice.")
    message = choices[0].get("message")
    if not isinstance(message, dict):
        raise BadRow(f"choices[0].message must be an object, got {shortened(message)}.")
    return [{"logprobs": choices[0].get("logprobs"), **message}]


def _entry(where: str, value: Any, ignored: Counter[str]) -> Said:
    if not isinstance(value, dict):
        raise BadRow(f"{where} must be an object, got {shortened(value)}.")
    for name in _MUST_BE_EMPTY:
        if value.get(name):
            raise BadRow(f"{where}.{name} must be empty, got {shortened(value[name])}. Use tool_calls or content.")
    ignored.update(f"messages.{name}" for name in value if name not in (*_OF_MESSAGE, *_MUST_BE_EMPTY))
    known = {name: part for name, part in value.items() if name in _OF_MESSAGE}
    known["content"] = _text(f"{where}.content", value.get("content"))
    known["tool_calls"] = _calls(f"{where}.tool_calls", value.get("tool_calls"))
    for name in ("name", "tool_call_id", "reasoning_content"):
        if not isinstance(value.get(name), (str, type(None))):
            raise BadRow(f"{where}.{name} must be text, got {shortened(value[name])}.")
    try:
        message = read_message(0, known)
    except RenderError as error:
        raise BadRow(str(error).replace("messages[0]", where)) from None
    weight = value.get("weight", 1)
    if weight not in (0, 1):
        raise BadRow(f"{where}.weight must be 0 or 1, got {shortened(weight)}.")
    return Said(message, bool(weight), _log_probs(f"{where}.logprobs", value.get("logprobs")))


def _text(where: str, content: Any) -> str | None:
    """A text, or the texts of its parts."""
    if not isinstance(content, list):
        return content  # type: ignore[no-any-return]  # what reads the message says what is wrong with it
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
        raise BadRow(f"{where} must be text, got parts of another kind.")
    return "".join(str(text) for text in texts)


def _calls(where: str, calls: Any) -> list[Any]:
    if not isinstance(calls, (list, type(None))):
        raise BadRow(f"{where} must be a list, got {shortened(calls)}.")
    return [_call(f"{where}[{i}]", call) for i, call in enumerate(calls or ())]


def _call(where: str, call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(call.get("id"), (str, type(None))):
        raise BadRow(f"{where} must be an object with a function, got {shortened(call)}.")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = free_form(arguments, constants=True)
        except NotStrict as error:
            raise BadRow(f"{where}.function.arguments must {error}.") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _log_probs(where: str, value: Any) -> tuple[TokenLogProb, ...] | None:
    content = value.get("content") if isinstance(value, dict) else None
    if not content:
        return None
    if not isinstance(content, list):
        raise BadRow(f"{where}.content must be a list, got {shortened(content)}.")
    return tuple(_log_prob(f"{where}.content[{i}]", entry) for i, entry in enumerate(content))


def _log_prob(where: str, entry: Any) -> TokenLogProb:
    token = entry.get("token") if isinstance(entry, dict) else None
    number = entry.get("logprob") if isinstance(entry, dict) else None
    if not isinstance(token, str) or isinstance(number, bool) or not isinstance(number, (int, float)):
        raise BadRow(f"{where} must hold a token and its logprob, got {shortened(entry)}.")
    raw = entry.get("bytes")
    try:
        return TokenLogProb(token, token.encode("utf-8", "surrogatepass") if raw is None else bytes(raw), float(number))
    except (TypeError, ValueError, OverflowError):
        raise BadRow(f"{where} must hold bytes and a finite logprob, got {shortened(entry)}.") from None


def _number(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= 1e300:
        raise BadRow(f"{name} must be a finite number, got {shortened(value)}.")
    return float(value)


def _flag(row: Mapping[str, Any], name: str) -> bool | None:
    value = row.get(name)
    if not isinstance(value, (bool, type(None))):
        raise BadRow(f"{name} must be true or false, got {shortened(value)}.")
    return value


def _conversation(
    entries: list[Said], tools: list[dict[str, Any]], reward: float | None, success: bool | None
) -> Conversation:
    replies = [i for i, entry in enumerate(entries) if entry.message.role == "assistant"]
    trained = [i for i in replies if entries[i].trained]
    if not trained or replies[-1] != len(entries) - 1:
        raise BadRow("messages must end in a reply of the assistant, and one of them be trained, got none.")
    task = next((entry.message.content for entry in entries if entry.message.role == "user"), None)
    if task is None:
        raise BadRow("messages must hold one of a user's, got none.")
    start = trained[0]
    cuts = [i for i in replies if i >= start] + [len(entries)]
    turns = [(entries[i], tuple(entry.message for entry in entries[i + 1 : end])) for i, end in pairwise(cuts)]
    return Conversation(tuple(entry.message for entry in entries[:start]), tuple(turns), tools, task, reward, success)
