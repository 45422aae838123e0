"""A model's chat template, run the way transformers runs it: sandboxed jinja2 with the same extras."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from context.messages import Message, calls_named_by_ids, content_hash

_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "strftime_now", "raise_exception"})
_WORD = re.compile(r"[\w.$-]*")
_Row = Mapping[str, Any]
# `message.thinking`, `message["thinking"]`: GPT-OSS and the first LFM2.5 read `reasoning_content` by this name.
_THINKING_FIELD = re.compile(r"""message(\.|\[["'])thinking\b""")
LOOKUP: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up a record.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "Which record."}},
            "required": ["key"],
        },
    },
}
_ID = "call00001"  # nine letters and digits, as Mistral's templates demand
_ASKED: _Row = {"role": "user", "content": "pearl-0417"}
CALLED: tuple[_Row, ...] = (
    _ASKED,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": _ID, "type": "function", "function": {"name": "lookup", "arguments": {}}}],
    },
    {"role": "tool", "name": "lookup", "content": "x", "tool_call_id": _ID},
)


class RenderError(ValueError):
    """A chat template does not fit the conversation or tools."""


class ChatTemplate:
    """A chat template, as the model's authors wrote it, turns messages into text.

    The template runs in jinja2's immutable sandbox and reaches only its variables. Its time and memory are not limited,
    because whoever loads a model trusts its programs.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        tool_use: str | None = None,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """`tool_use` is the template for prompts with tools. `args` are further variables, such as enable_thinking."""
        self.source = source
        self.tool_use = tool_use
        self.args = dict(args or {})
        self._special_tokens = dict(special_tokens)
        self._check_args()
        self.hash = hashlib.sha256(source.encode()).hexdigest()
        if tool_use is not None or self.args:
            self.hash = content_hash({"source": source, "tool_use": tool_use, "args": self.args})
        given = {**self._special_tokens, **self.args}
        self._plain = _Source(source, given, tools=())
        self._with_tools = self._plain if tool_use is None else _Source(tool_use, given, tools=(LOOKUP,))

    def render(
        self, rows: Sequence[_Row], *, tools: Sequence[_Row] = (), generation_prompt: bool, now: datetime | None = None
    ) -> str:
        """Render a conversation, given as rows of `to_template`, to text. `now` is the template's current time."""
        chosen = self._with_tools if tools else self._plain
        return chosen.render(rows, tools=tools, generation_prompt=generation_prompt, now=now)

    def marking(self, mark: Callable[[str], str]) -> ChatTemplate:
        """Apply `mark` to the texts in a copy's source, but not to words, which the template may compare or look up."""
        found = copy(self)
        found._plain = self._plain.marking(mark)
        found._with_tools = found._plain if self.tool_use is None else self._with_tools.marking(mark)
        return found

    @property
    def knows_thoughts(self) -> bool:
        """True if the template reads `<think>` ... `</think>` in a content as a thought, or writes these marks."""
        return "</think>" in self.source

    @property
    def reads_thoughts(self) -> bool:
        """True if the template reads thoughts from a field of their own, and writes the marks around them."""
        return self.knows_thoughts and ("reasoning_content" in self.source or bool(_THINKING_FIELD.search(self.source)))

    @cached_property
    def needs_call_ids(self) -> bool:
        """True if the template refuses a call without an id, or writes a missing id as nothing or as `None`."""
        return any(source.needs_call_ids for source in (self._plain, self._with_tools))

    def with_call_ids(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages with call ids that contain the tools' names, if this template writes ids in place of names."""
        return calls_named_by_ids(messages) if self._with_tools.names_calls_by_ids else messages

    def _check_args(self) -> None:
        for name in self.args:
            if name in _GIVEN or name in self._special_tokens:
                raise RenderError(f"template_args must not name what the renderer gives, got {name!r}. Remove it.")
        read = _variables(self.source + (self.tool_use or "")) if self.args else set()
        if unread := [name for name in self.args if name not in read]:
            known = ", ".join(sorted(read - _GIVEN - self._special_tokens.keys())) or "none"
            raise RenderError(
                f"template_args must name variables that the chat template reads, got {unread[0]!r}. It reads: {known}."
            )


@dataclass(frozen=True)
class _Forms:
    """The ways in which a template's messages differ from OpenAI's."""

    thinking: bool = False
    """True: `reasoning_content` is called `thinking`."""
    json_arguments: bool = False
    """True: arguments are JSON text, as DeepSeek-V3 pastes them."""
    parts: bool = False
    """True: contents are lists of text parts."""

    def adapted(self, row: _Row) -> _Row:
        if self.thinking and "reasoning_content" in row:
            row = {**row, "thinking": row["reasoning_content"]}
        if self.json_arguments and "tool_calls" in row:
            row = {**row, "tool_calls": [_with_json_arguments(call) for call in row["tool_calls"]]}
        if self.parts and isinstance(row.get("content"), str):
            row = {**row, "content": [{"type": "text", "text": row["content"]}]}
        return row


class _Source:
    """One compiled template, with the form in which it takes messages."""

    def __init__(self, source: str, given: Mapping[str, Any], *, tools: Sequence[_Row]) -> None:
        self._source = source
        self._given = given
        self._probe_tools = tools
        try:
            self._compiled = _sandbox().from_string(source)
        except Exception as error:  # noqa: BLE001 (a template may raise anything)
            raise RenderError(f"chat template must be valid jinja2, got: {_one_line(error)}.") from None
        self._forms = _Forms(thinking="reasoning_content" not in source and bool(_THINKING_FIELD.search(source)))
        in_parts = replace(self._forms, parts=True)
        if not self._shows_content(self._forms) and self._shows_content(in_parts):
            self._forms = in_parts
        as_text = replace(self._forms, json_arguments=True)
        if self._probe(CALLED[:2], self._forms) is None and self._probe(CALLED[:2], as_text) is not None:
            self._forms = as_text

    def marking(self, mark: Callable[[str], str]) -> _Source:
        found, tree = copy(self), _sandbox().parse(self._source)
        for text in tree.find_all(nodes.TemplateData):
            text.data = mark(text.data)
        for const in tree.find_all(nodes.Const):
            const.value = _marked(const.value, mark)
        found._compiled = _sandbox().from_string(tree)
        found._given = {name: _marked(value, mark) for name, value in self._given.items()}
        return found

    @cached_property
    def needs_call_ids(self) -> bool:
        for rows in (CALLED, CALLED[:2]):
            named = self._probe(rows, self._forms)
            if named is not None:
                plain = self._probe([_without_ids(row) for row in rows], self._forms)
                without = [named.replace(_ID, written) for written in ("", "None")]
                return plain is None or (plain != named and plain in without)
        return False

    @cached_property
    def names_calls_by_ids(self) -> bool:
        _, _, call = (self._probe(CALLED[:2], self._forms) or "").rpartition(str(_ASKED["content"]))
        return _ID in call and "lookup" not in call

    def render(
        self,
        rows: Sequence[_Row],
        *,
        tools: Sequence[_Row],
        generation_prompt: bool,
        now: datetime | None,
        forms: _Forms | None = None,
    ) -> str:
        used = forms or self._forms
        try:
            return self._compiled.render(
                messages=[used.adapted(row) for row in rows],
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=generation_prompt,
                strftime_now=(now or datetime.now()).strftime,
                **self._given,
            )
        except Exception as error:
            roles = ", ".join(str(row["role"]) for row in rows[:8]) + (", ..." if len(rows) > 8 else "")
            raise RenderError(
                f"chat template must render messages with the roles [{roles}], got: {_one_line(error)}. "
                "Set context.template: hermes, or give messages that this template accepts."
            ) from error

    def _shows_content(self, forms: _Forms) -> bool:
        return str(_ASKED["content"]) in (self._probe([_ASKED], forms) or "")

    def _probe(self, rows: Sequence[_Row], forms: _Forms) -> str | None:
        """The rendering of these rows. None: the template refuses them."""
        try:
            return self.render(rows, tools=self._probe_tools, generation_prompt=True, now=None, forms=forms)
        except RenderError:
            return None


def _without_ids(row: _Row) -> dict[str, Any]:
    plain = {key: value for key, value in row.items() if key != "tool_call_id"}
    if "tool_calls" in plain:
        plain["tool_calls"] = [{k: v for k, v in call.items() if k != "id"} for call in plain["tool_calls"]]
    return plain


def _with_json_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with faster access to the fields of messages and of loops.

    A message's field is no attribute, and jinja2's own look-up spends most time on exceptions. A loop's field is safe.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and not hasattr(dict, attribute):
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is LoopContext and hasattr(LoopContext, attribute) and not attribute.startswith("_"):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


@cache
def _sandbox() -> ImmutableSandboxedEnvironment:
    """The environment of transformers' chat templates."""
    made = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    return made


class _GenerationBlock(Extension):
    """Reads `{% generation %}` ... `{% endgeneration %}`, by which other tools find replies. Here authors mark them."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers does. jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _marked(value: Any, mark: Callable[[str], str]) -> Any:
    return mark(value) if isinstance(value, str) and not _WORD.fullmatch(value) else value


def _variables(source: str) -> set[str]:
    """Find the names that a template reads and does not set. A text that is no template has none."""
    try:
        return set(meta.find_undeclared_variables(_sandbox().parse(source)))
    except jinja2.TemplateError:
        return set()


def _one_line(error: BaseException) -> str:
    # Half characters, which mark a template's own control tokens, are left out: no terminal can show them.
    said = "".join(character for character in str(error) if not "\ud800" <= character <= "\udfff")
    return next(iter(f"{type(error).__name__}: {said}".splitlines()))[:200]
