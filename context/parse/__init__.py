"""Sampled text -> message with tool calls, with an explicit outcome. Nothing the policy writes raises."""

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
