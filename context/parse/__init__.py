"""Sampled text -> message with tool calls, with an explicit outcome. Nothing the policy writes raises."""

from __future__ import annotations

from collections.abc import Callable

from context.parse.json_calls import HermesParser, Llama3JsonParser
from context.parse.pythonic import PythonicParser
from context.parse.react import ReactParser
from context.parse.reply import NAME, KnownReply, Outcome, Reply, ReplyParser

__all__ = [
    "NAME",
    "PARSERS",
    "HermesParser",
    "KnownReply",
    "Llama3JsonParser",
    "Outcome",
    "PythonicParser",
    "ReactParser",
    "Reply",
    "ReplyParser",
    "choose_parser",
]

PARSERS: dict[str, Callable[[], ReplyParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "pythonic": PythonicParser,
    "react": ReactParser,
}
"""The built-in parsers by name."""


def choose_parser(name: str, template_source: str) -> ReplyParser:
    """The parser of that name; `auto` takes the format in which the chat template writes tool calls."""
    if name == "auto":
        name = _written_format(template_source)
    if name not in PARSERS:
        raise ValueError(f"context.parser must be one of auto, {', '.join(PARSERS)}, got {name!r}.")
    return PARSERS[name]()


def _written_format(source: str) -> str:
    if "<function=" in source:
        raise ValueError(
            "context.parser must be named for a chat template that writes tool calls as <function=...>, got 'auto'. "
            f"Take one of {', '.join(PARSERS)}, or a parser class of your own."
        )
    if "<tool_call>" in source:
        return "hermes"
    if "<|tool_call_start|>" in source:
        return "pythonic"
    return "llama3_json" if "tool" in source else "react"
