"""A model's chat template, run the way transformers runs it: sandboxed jinja2 with the same extras."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from context.messages import Message, to_template

# `message.thinking`, `message["thinking"]`: what GPT-OSS and the first LFM2.5 call `reasoning_content`.
_THINKING_FIELD = re.compile(r"""message(\.|\[["'])thinking\b""")
_CALLING: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": "x"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "call00001", "function": {"name": "f", "arguments": {}}}],
    },
)


class RenderError(ValueError):
    """A chat template and what it was given do not fit together."""


class ChatTemplate:
    """Messages -> text, as the model's authors wrote it down.

    Templates come with models and are not trusted: they run in jinja2's immutable sandbox.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.hash = hashlib.sha256(source.encode()).hexdigest()
        self._special_tokens = dict(special_tokens)
        try:
            self._compiled = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise RenderError(f"chat template must be valid jinja2, got: {_one_line(error)}.") from None
        self._reads_thinking = "reasoning_content" not in source and bool(_THINKING_FIELD.search(source))
        self._arguments_as_json = self._wants_json_arguments()

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), generation_prompt: bool
    ) -> str:
        """The text of a conversation; with `generation_prompt`, up to where the next reply begins."""
        rows = [to_template(message) for message in messages]
        return self.render_rows(rows, tools=tools, generation_prompt=generation_prompt)

    def render_rows(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        generation_prompt: bool,
    ) -> str:
        """As `render`, for messages in the form most templates read."""
        try:
            return self._compiled.render(
                messages=[self._adapted(row) for row in rows],
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self._special_tokens,
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
        ) as error:
            roles = ", ".join(str(row["role"]) for row in rows)
            raise RenderError(
                f"chat template must render messages with the roles [{roles}], got: {_one_line(error)}. "
                "Give messages that this template accepts, or another template."
            ) from error

    def _wants_json_arguments(self) -> bool:
        """Some templates (DeepSeek-V3) paste arguments as they are: these have to be text."""
        for as_json in (False, True):
            self._arguments_as_json = as_json
            try:
                self.render_rows(_CALLING, generation_prompt=True)
            except RenderError:
                continue
            return as_json
        return False

    def _adapted(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The message with thinking and arguments where this template looks for them."""
        if self._reads_thinking and "reasoning_content" in row:
            row = {**row, "thinking": row["reasoning_content"]}
        if self._arguments_as_json and "tool_calls" in row:
            row = {**row, "tool_calls": [_with_json_arguments(call) for call in row["tool_calls"]]}
        return row


def _with_json_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _tojson(function["arguments"])}}


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks replies for other tools; here authors do that."""

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
    # jinja2's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
