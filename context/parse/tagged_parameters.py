"""Tool calls as a name, and each argument in tags of its own as plain text.

Plain text has no types. The schema of a known tool says whether `3` is text or a number. For other tools, text that
reads as JSON is JSON. Templates that print with Python write True, False and None.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from context.messages import ToolCall
from context.parse.json_calls import SAME_KEY, strict_json
from context.parse.reply import NOT_CLOSED, THINK, BlockParser, Malformed, Tools, check_tool_name

_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}


class TaggedParametersParser(BlockParser):
    """A parser of blocks of calls whose arguments are in tags.

    A value ends at a closing tag only if the format's next tag follows. So a value may contain the text of a closing
    tag. Malformed: unclosed tags, tags in another order, an argument given twice, no name of a tool.
    """

    name: ClassVar[re.Pattern[str]]
    """Begins a call; group 1 has the tool's name."""
    key: ClassVar[re.Pattern[str]]
    """Begins an argument, up to the value; group 1 has the argument's name."""
    value_end: ClassVar[re.Pattern[str]]
    call_end: ClassVar[re.Pattern[str]]

    def __init__(self, tools: Tools = ()) -> None:
        super().__init__(tools)
        self._types: dict[str, dict[str, frozenset[str]]] = {}
        for function in (tool.get("function", tool) for tool in tools):
            schemas = (function.get("parameters") or {}).get("properties")
            schemas = schemas if isinstance(schemas, dict) else {}
            self._types[str(function["name"])] = {key: frozenset(_json_types(row)) for key, row in schemas.items()}

    def _content(self, around: Sequence[str]) -> str:
        return around[0] if len(around) == 1 else around[0].rstrip("\n")

    def _call(self, text: str, start: int) -> tuple[ToolCall, int]:
        named = self.name.match(text, start)
        if named is None:
            is_closed = str(self.closing) in text[start:]
            raise Malformed("a tool call has no name in its tag" if is_closed else NOT_CLOSED)
        name, end = check_tool_name(named[1].strip()), named.end()
        arguments: dict[str, Any] = {}
        while (key := self.key.match(text, end)) is not None:
            closed = self.value_end.search(text, key.end())
            if closed is None:
                raise Malformed("an argument of a tool call is not closed")
            if key[1] in arguments:
                raise Malformed(SAME_KEY)
            arguments[key[1]] = self._value(name, key, text[key.end() : closed.start()])
            end = closed.end()
        closing = self.call_end.match(text, end)
        if closing is None:
            raise Malformed(NOT_CLOSED)
        return ToolCall(name, arguments), closing.end()

    def _value(self, name: str, key: re.Match[str], text: str) -> Any:
        return _by_schema(text, self._types.get(name, {}).get(key[1], frozenset()))


class QwenCoderParser(TaggedParametersParser):
    r"""`<tool_call>` `<function=name>` `<parameter=key>`\nvalue\n`</parameter>` ... `</function>` `</tool_call>`.

    Qwen3-Coder, Qwen3.5 and later, Nemotron 3: the models' chat templates.
    """

    opening, closing = re.compile("<tool_call>"), "</tool_call>"
    name = re.compile(r"\s*<function=([^>\n]*)>")
    key = re.compile(r"\s*<parameter=([^>\n]*)>\n?")
    value_end = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=|</function>))")
    call_end = re.compile(r"\s*</function>")


class GlmParser(TaggedParametersParser):
    """`<tool_call>name` `<arg_key>key</arg_key>` `<arg_value>value</arg_value>` ... `</tool_call>`.

    GLM-4.5 and later: the models' chat templates.
    """

    opening, closing = re.compile("<tool_call>"), "</tool_call>"
    name = re.compile(r"\s*([^\s<]+)")
    key = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>")
    value_end = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>))")
    call_end = re.compile(r"(?=\s*</tool_call>)")


class MiniMaxParser(TaggedParametersParser):
    """`<minimax:tool_call>` `<invoke name="...">` `<parameter name="key">value</parameter>` ... `</invoke>` ...

    One block holds several calls: MiniMax M2's guide to tool calls.
    """

    opening, closing = re.compile("<minimax:tool_call>"), "</minimax:tool_call>"
    name = re.compile(r'\s*<invoke name="([^">\n]*)">')
    key = re.compile(r'\s*<parameter name="([^">\n]*)">')
    value_end = re.compile(r"</parameter>(?=\s*(?:<parameter name=|</invoke>))")
    call_end = re.compile(r"\s*</invoke>")


class TypedParametersParser(TaggedParametersParser):
    """A parser of blocks whose tags say whether a value is text or JSON, in group 2 of `key`."""

    def _value(self, name: str, key: re.Match[str], text: str) -> Any:
        return text if key[2] in ("true", "string") else strict_json(text)


class DeepSeekV4Parser(TypedParametersParser):
    """`<｜DSML｜tool_calls>` `<｜DSML｜invoke name="...">` `<｜DSML｜parameter name="key" string="true">value` ...

    Every tag is closed by `</｜DSML｜...>`: DeepSeek V4's encoding.
    """

    opening, closing = re.compile("<｜DSML｜tool_calls>"), "</｜DSML｜tool_calls>"
    name = re.compile(r'\s*<｜DSML｜invoke name="([^">\n]*)">')
    key = re.compile(r'\s*<｜DSML｜parameter name="([^">\n]*)" string="(true|false)">')
    value_end = re.compile(r"</｜DSML｜parameter>(?=\s*(?:<｜DSML｜parameter name=|</｜DSML｜invoke>))")
    call_end = re.compile(r"\s*</｜DSML｜invoke>")


class KimiK3Parser(TypedParametersParser):
    """A parser of `<|open|>call tool="..." index="1"<|sep|>` `<|open|>argument key="..." type="string"<|sep|>value` ...

    Kimi K3's chat template writes calls between `<|open|>tools<|sep|>` and `<|close|>tools<|sep|>`, answers in
    `response`, thinking in `think`, and all three in `message`.
    """

    thinking = (("<|open|>think<|sep|>", "<|close|>think<|sep|>"), THINK)
    opening, closing = re.compile(r"<\|open\|>tools<\|sep\|>"), "<|close|>tools<|sep|>"
    name = re.compile(r'\s*<\|open\|>call tool="([^"\n]*)"[^<\n]*<\|sep\|>')
    key = re.compile(r'\s*<\|open\|>argument key="([^"&\n]*)" type="(\w+)"<\|sep\|>')
    value_end = re.compile(r"<\|close\|>argument<\|sep\|>(?=\s*<\|(?:open\|>argument |close\|>call<))")
    call_end = re.compile(r"\s*<\|close\|>call<\|sep\|>")
    _AROUND = re.compile(r"<\|(?:open|close)\|>(?:response|message)<\|sep\|>")

    def _content(self, around: Sequence[str]) -> str:
        return self._AROUND.sub("", super()._content(around))


def _json_types(schema: Any) -> Iterator[str]:
    """The types that a schema allows; none if the schema names none."""
    if not isinstance(schema, dict):
        return
    kind, words = schema.get("type"), schema.get("enum")
    kinds = kind if isinstance(kind, list) else [kind]
    yield from (each for each in kinds if isinstance(each, str))
    for choices in (schema.get("anyOf"), schema.get("oneOf")):
        for choice in choices if isinstance(choices, list) else ():
            yield from _json_types(choice)
    if kind is None and isinstance(words, list) and all(isinstance(word, str) for word in words):
        yield "string"


def _by_schema(text: str, types: frozenset[str]) -> Any:
    if types == frozenset({"string"}):
        return text
    try:
        value = _PYTHON_WORDS[text.strip()] if text.strip() in _PYTHON_WORDS else strict_json(text)
    except Malformed:
        return text
    kind = _JSON_TYPES.get(type(value))
    fits = kind in types or (kind == "integer" and "number" in types)
    return text if kind is None or ("string" in types and not fits) else value
