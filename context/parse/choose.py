"""Chooses the parser for a model's calls: the chat template writes some calls, and a parser must read them back."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from context.parse.harmony import HarmonyParser
from context.parse.named_json import DeepSeekParser, GemmaParser, KimiParser, MistralParser, ReactParser
from context.parse.pythonic import OlmoParser, PythonicParser
from context.parse.reply import CallParser, ReplyParser, Tools
from context.parse.tagged_json import (
    CommandAParser,
    CommandRParser,
    GraniteParser,
    HermesParser,
    JambaParser,
    Llama3JsonParser,
    NemotronParser,
    PhiParser,
)
from context.parse.tagged_parameters import DeepSeekV4Parser, GlmParser, KimiK3Parser, MiniMaxParser, QwenCoderParser
from context.wording import shared_opening

PARSERS: dict[str, type[CallParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "pythonic": PythonicParser,
    "olmo3": OlmoParser,
    "qwen3_coder": QwenCoderParser,
    "glm": GlmParser,
    "mistral": MistralParser,
    "deepseek": DeepSeekParser,
    "deepseek_v4": DeepSeekV4Parser,
    "kimi": KimiParser,
    "kimi_k3": KimiK3Parser,
    "gemma": GemmaParser,
    "harmony": HarmonyParser,
    "minimax": MiniMaxParser,
    "phi4_mini": PhiParser,
    "granite": GraniteParser,  # reads Phi's calls too, and takes what closes them for text behind
    "nemotron": NemotronParser,
    "command_r": CommandRParser,
    "command_a": CommandAParser,
    "jamba": JambaParser,
    "react": ReactParser,
}
"""The built-in parsers by name, in the order in which `auto` tries them."""

_SHOWN = 200
_NAME = "find_stone"
_IDS = ("call00001", f"functions.{_NAME}:0"), ("call00002", f"functions.{_NAME}:1")
"""The ids of the first and the second call, in the form of most families and in that of Kimi K2."""
_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"key": 'a "pearl", é, amber', "count": 3, "ratio": 1.5, "deep": True, "rows": [1, 2], "more": {"see": "coral"}},
    {"key": "an opal", "count": 4, "ratio": 0.5, "deep": False, "rows": [], "more": {}},
)
_TYPES = {"key": "string", "count": "integer", "ratio": "number", "deep": "boolean", "rows": "array", "more": "object"}
_PROPERTIES: dict[str, Any] = {name: {"type": kind, "description": f"The {name}."} for name, kind in _TYPES.items()}
_PROPERTIES["rows"]["items"] = {"type": "integer"}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": list(_TYPES)}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": _NAME, "description": "Finds stones.", "parameters": _PARAMETERS},
}
_USER = {"role": "user", "content": "x"}
_ANSWER = {"role": "assistant", "content": "Q."}
_RESULT = "Z-result"
_LAST_TAG = re.compile(r"(?:<[^<>\s]{1,40}>|\[[^\[\]\s]{1,40}\])\s*\Z")
_CUT_TAG = re.compile(r"<[^<>\s]{0,40}\Z")
_MOST_TAGS = 4


class Template(Protocol):
    def render(
        self, rows: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), generation_prompt: bool
    ) -> str:
        """The text of a conversation. Raises ValueError where the template refuses it."""


WrittenCalls = tuple[int, tuple[str, ...]]
"""The number of calls in a reply, and the texts that the policy may have written: where its turn ends is unknown."""


def choose_parser(name: str, template: Template, *, tools: Tools = ()) -> ReplyParser:
    """The parser of that name for a conversation with these `tools`. `auto`: see `auto_parser`."""
    if name == "auto":
        name = auto_parser(template, tools)
    if name not in PARSERS:
        raise ValueError(f"context.parser must be one of auto, {', '.join(PARSERS)}, got {name!r}.")
    return PARSERS[name](tools)


def auto_parser(template: Template, tools: Tools) -> str:
    """The name of the first parser that reads a call of the template, and two parallel calls.

    A template that writes no calls gets `react`, or the parser of its tags around answers. Raises ValueError if no
    parser reads the calls, or if the template shows tools but writes no calls.
    """
    return _auto_parser(template, bool(tools))  # type: ignore[arg-type]  # any object that is no value has a hash


@lru_cache(64)  # asked for each reply of a file of demonstrations
def _auto_parser(template: Template, has_tools: bool) -> str:
    written = written_calls(template)
    for name, kind in PARSERS.items():
        if written and _reads(kind((_TOOL,)), written):
            return name
    if written:
        raise ValueError(
            "context.parser must be a class of your own for a chat template whose tool calls no built-in parser reads, "
            f"got 'auto' and {_start(written)!r}. Give path/to/file.py:ClassName, or react if the prompt describes the "
            "tools."
        )
    if has_tools and _NAME in _text(template, _USER):
        raise ValueError(
            "context.parser must be named for a chat template that shows tools and leaves calls out, got 'auto'. Name "
            "the one that reads the model's calls, or set context.template: hermes (or llama3, mistral, a .jinja file)."
        )
    return _reader_of_answers(template)


def reply_parser(template: Template, tools: Tools, *, calls: bool) -> ReplyParser:
    """The parser that `auto` chooses. Without `calls`, it need not know the format of calls."""
    try:
        return choose_parser("auto", template, tools=tools)
    except ValueError:
        if calls:
            raise
        return PARSERS[_reader_of_answers(template)](tools)


def _reader_of_answers(template: Template) -> str:
    """The parser of the tags that the template writes around an answer. `react`: the template writes none."""
    answer = _text(template, _USER, _ANSWER)
    return next((n for n, kind in PARSERS.items() if kind.answer_tags and kind.answer_tags.search(answer)), "react")


def written_calls(template: Template) -> list[WrittenCalls]:
    """One call and two parallel calls with each kind of ids, as the template writes them."""
    written = (_written(template, ids[:count]) for ids in zip(*_IDS, strict=True) for count in (1, 2))
    return [calls for calls in written if calls is not None]


def unread_call(parser: ReplyParser, template: Template) -> str | None:
    """The start of a call that the template writes and the parser can't read. None: there is no such call."""
    written = written_calls(template)
    return _start(written) if written and not _reads(parser, written) else None


def _start(written: Sequence[WrittenCalls]) -> str:
    return written[0][1][0][:_SHOWN]


def _reads(parser: ReplyParser, written: list[WrittenCalls]) -> bool:
    """True if the parser reads the single call and any parallel calls, with some kind of ids."""
    read = {n: [_reads_one(parser, *calls) for calls in written if calls[0] == n] for n in (1, 2)}
    return any(read[1]) and (not read[2] or any(read[2]))


def _reads_one(parser: ReplyParser, count: int, texts: Sequence[str]) -> bool:
    expected = [(_NAME, arguments) for arguments in _ARGUMENTS[:count]]
    read = (parser.parse(text, stopped=True).message for text in texts)
    found = ([(call.name, dict(call.arguments)) for call in row.tool_calls] for row in read if not row.content.strip())
    return expected in found


def _written(template: Template, ids: Sequence[str]) -> WrittenCalls | None:
    """The reply with calls of these ids. None: the template does not write it."""
    for results in ((), ids):  # some templates write only calls that have been answered
        text = _reply_text(template, ids, results)
        if all(str(given["key"]).split()[-1] in text for given in _ARGUMENTS[: len(ids)]):
            return len(ids), _without_end(text, _text(template, _USER, _ANSWER))
    return None


def _reply_text(template: Template, ids: Sequence[str], results: Sequence[str]) -> str:
    """The text behind the prompt, up to the first result. Empty: the template refuses."""
    calls = [
        {"type": "function", "id": call_id, "function": {"name": _NAME, "arguments": arguments}}
        for call_id, arguments in zip(ids, _ARGUMENTS, strict=False)
    ]
    reply = {"role": "assistant", "content": "", "tool_calls": calls}
    answers = [{"role": "tool", "name": _NAME, "tool_call_id": call_id, "content": _RESULT} for call_id in results]
    whole = _text(template, _USER, reply, *answers)
    prompt, answer = _text(template, _USER), _text(template, _USER, _ANSWER)
    # A template may write a reply otherwise than it opens one. The reply begins where both part, or two replies do.
    apart = max(_common_start(whole, prompt), _common_start(whole, answer))
    start = len(prompt) if whole.startswith(prompt) else apart
    return whole[start:].partition(_RESULT)[0]


def _text(template: Template, *rows: Mapping[str, Any]) -> str:
    """The rendering of these rows. Empty: the template refuses them."""
    try:
        return template.render(rows, tools=[_TOOL], generation_prompt=len(rows) == 1)
    except ValueError:
        return ""


def _common_start(text: str, other: str) -> int:
    """The length of the common beginning, without a control token that is cut at its end."""
    common = len(shared_opening(text, other))
    within = _CUT_TAG.search(text[:common])
    return within.start() if within else common


def _without_end(text: str, answer: str) -> tuple[str, ...]:
    """The text, and the text without what may end its turn: the last tags, or the end that an answer has too."""
    cuts = [text, text[: len(text) - len(shared_opening(text[::-1], answer[::-1]))]]
    for _ in range(_MOST_TAGS):
        cuts.append(_LAST_TAG.sub("", cuts[-1] if len(cuts) > 2 else text))
    return tuple(dict.fromkeys(cuts))
