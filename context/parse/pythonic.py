"""Tool calls written as Python: `lookup(key="pearl")`, in a list or a line each. They are read, never evaluated."""

import ast
import json
import re
import warnings
from typing import Any

from context.messages import ToolCall
from context.parse.json_calls import SAME_KEY, strict_json
from context.parse.reply import (
    NOT_CLOSED,
    TOO_DEEP,
    BlockParser,
    CallParser,
    Malformed,
    ReadCalls,
    check_length,
    check_tool_name,
)

_FILE = "<tool calls>"
_MAX_PARTS = 10_000  # Python's parser needs more time for brackets and commas than for long texts
# Python warns of escapes that it doubts ("\d"). The policy wrote them, so nobody is warned here.
warnings.filterwarnings("ignore", category=SyntaxWarning, module=re.escape(_FILE))
_JSON_NAMES = {"true": True, "false": False, "null": None}
_TOKEN = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[()\[\]{}]""", re.DOTALL)
_LINE_BREAKS = str.maketrans({"\n": "\\n", "\r": "\\r"})


class PythonicParser(CallParser):
    """A list of calls with named arguments, as the whole reply or behind a tag: Llama 4, LFM2.

    The tags are Llama's `<|python_tag|>` and LFM2's `<|tool_call_start|>` ... `<|tool_call_end|>`. Text behind LFM2's
    end belongs to the content; text behind calls without tags is left out. A line break within quotation marks stands
    for itself, as LFM2.5's template writes it. Malformed: no list of calls, arguments without a name, values that are
    no literals.
    """

    _CALLS = re.compile(r"\s*(?=\[\s*[A-Za-z_][\w.]*\s*\()")
    _OPEN = re.compile(r"<\|(?:python_tag|tool_call_start)\|>")
    _CLOSE = re.compile(r"\s*<\|tool_call_end\|>")

    def _read_calls(self, text: str) -> ReadCalls:
        bare = self._CALLS.match(text)
        if bare is not None:
            return ReadCalls("", _calls(text, bare.end())[0])
        tag = self._OPEN.search(text)
        if tag is None:
            return ReadCalls(text)
        calls, end = _calls(text, tag.end())
        content = text[: tag.start()]
        closed = self._CLOSE.match(text, end)
        if "start" in tag[0] and closed is None:
            raise Malformed(NOT_CLOSED)
        if closed is not None and text[closed.end() :].strip():
            content += text[closed.end() :]
        return ReadCalls(content.removesuffix("\n"), calls)


class OlmoParser(BlockParser):
    """`<function_calls>` f(a=1, b="x"), a line for each call, `</function_calls>`: OLMo 3 Instruct's chat template."""

    opening, closing = re.compile("<function_calls>"), "</function_calls>"

    def _call(self, text: str, start: int) -> tuple[ToolCall, int]:
        if start == len(text):
            raise Malformed(NOT_CLOSED)
        node, end = _expression(text, start)
        return _call(node), end


def _calls(text: str, start: int) -> tuple[tuple[ToolCall, ...], int]:
    """The list of calls that begins at `start`, and its end."""
    check_length(len(text) - start)
    node, end = _expression(text, start)
    if not isinstance(node, ast.List) or not node.elts:
        raise Malformed("the tool calls are not a list of calls")
    return tuple(map(_call, node.elts)), end


def _expression(text: str, start: int) -> tuple[ast.expr, int]:
    """The expression from `start` up to the bracket that closes its first one, and its end."""
    end = _end_of_brackets(text, start)
    body = text[start:end]
    if sum(map(body.count, "([{,")) > _MAX_PARTS:
        raise Malformed(f"the tool calls have more than {_MAX_PARTS} parts")
    if "\n" in body or "\r" in body:
        body = _TOKEN.sub(lambda token: token[0].translate(_LINE_BREAKS), body)
    return _parsed(body), end


def _end_of_brackets(text: str, start: int) -> int:
    depth = 0
    for token in _TOKEN.finditer(text, start):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if depth == 0 and token[0] in ")]}":
            return token.end()
    return len(text)


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), _FILE, mode="eval").body
    except SyntaxError as error:
        raise Malformed(f"the tool calls are not valid Python: {str(error.msg)[:60]}") from None
    except (RecursionError, MemoryError):  # Python's parser raises either
        raise Malformed(TOO_DEEP) from None
    except ValueError:
        raise Malformed("the tool calls are not valid Python") from None


def _call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call):
        raise Malformed("the list of tool calls holds something else")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise Malformed("a tool call has an argument without a name")
    arguments = {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}
    if len(arguments) != len(node.keywords):
        raise Malformed(SAME_KEY)
    return ToolCall(check_tool_name(_dotted(node.func)), arguments)


def _dotted(node: ast.expr) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


class _JsonWords(ast.NodeTransformer):
    """Takes true, false and null for values, as templates write that dump arguments as JSON."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def _value(node: ast.expr) -> Any:
    """A value that JSON could hold: text, numbers, truth values, None, lists, dictionaries with text keys."""
    for part in ast.walk(node):
        if isinstance(part, ast.Dict):
            keys = [key.value if isinstance(key, ast.Constant) else None for key in part.keys]
            if not all(isinstance(key, str) for key in keys):
                raise Malformed("a dictionary in a tool call has a key that is not text")
            if len(set(keys)) != len(keys):
                raise Malformed(SAME_KEY)
    try:
        written = json.dumps(ast.literal_eval(_JsonWords().visit(node)))
    except (RecursionError, MemoryError):
        raise Malformed(TOO_DEEP) from None
    except (TypeError, ValueError):  # too many digits for int() among them
        raise Malformed("an argument of a tool call is not a literal") from None
    return strict_json(written)
