"""Reads sampled text as a message with tool calls and an outcome. No text of a policy raises an exception."""

from context.parse.choose import PARSERS, choose_parser, unread_call
from context.parse.named_json import ReactParser
from context.parse.reply import NAME, KnownReply, Reply, ReplyParser
from context.parse.tagged_json import HermesParser, Llama3JsonParser

__all__ = [
    "NAME",
    "PARSERS",
    "HermesParser",
    "KnownReply",
    "Llama3JsonParser",
    "ReactParser",
    "Reply",
    "ReplyParser",
    "choose_parser",
    "unread_call",
]
