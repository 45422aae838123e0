"""Conversations in OpenAI's chat format, one per line, and the context in which their replies are trained."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any

from pydantic import ConfigDict, Field, JsonValue

from context.manager import ContextManager
from context.messages import Message
from context.openai_messages import check_tools, read_message
from context.parse import KnownReply, ReplyParser
from context.strategies import CONTEXT_FULL, Strategy
from context.templates.render import Renderer
from replay.errors import shortened
from replay.exchange.json_text import BadRow, json_line
from replay.exchange.row_format import Part, typed

_READ = frozenset({"role", "content", "tool_calls", "name", "tool_call_id", "reasoning_content"})
_WITHOUT_TOKENS = ("function_call", "refusal", "audio")
"""Fields with a meaning that the chat template can't write."""


_Given = dict[str, JsonValue]


class ChatRow(Part):
    """A line, which may hold more fields than are read."""

    model_config = ConfigDict(extra="allow")

    messages: Annotated[list[_Given], Field(fail_fast=True)]
    tools: Annotated[list[_Given], Field(fail_fast=True)] | None = None
    reward: Annotated[float, Field(ge=-1e300, le=1e300)] | None = None
    success: bool | None = None


@dataclass(frozen=True)
class TeacherMessage:
    message: Message
    trained: bool
    """Whether the reply is trained; False if its `weight` is 0."""


@dataclass(frozen=True)
class Conversation:
    opening: tuple[Message, ...]
    """The messages before the first trained reply, including examples."""
    turns: tuple[tuple[TeacherMessage, tuple[Message, ...]], ...]
    """Each reply with the messages after it. Only the last reply has none."""
    tools: list[dict[str, Any]]
    task: str
    """The first user message."""
    reward: float | None
    success: bool | None

    @property
    def messages(self) -> list[Message]:
        return [*self.opening, *(said for reply, answers in self.turns for said in (reply.message, *answers))]

    def with_messages(self, messages: Iterable[Message]) -> "Conversation":
        """Return the same conversation with its messages replaced by `messages`, in order."""
        given = iter(messages)
        opening = tuple(islice(given, len(self.opening)))
        turns = ((replace(reply, message=next(given)), tuple(islice(given, len(back)))) for reply, back in self.turns)
        return replace(self, opening=opening, turns=tuple(turns))


def read_line(line: bytes, ignored: Counter[str]) -> Conversation:
    """The conversation of a line. `ignored` counts the fields that are not read. Raises BadRow, or RenderError for an
    invalid message."""
    row = typed(ChatRow, json_line(line))
    ignored.update((row.model_extra or {}).keys())
    entries = [_entry(index, message, ignored) for index, message in enumerate(row.messages)]
    replies = [i for i, entry in enumerate(entries) if entry.message.role == "assistant"]
    trained = [i for i in replies if entries[i].trained]
    if not trained or replies[-1] != len(entries) - 1:
        raise BadRow(
            "messages must end in a reply of the assistant and hold a trained one, got none. Add a reply, or give one "
            "weight 1."
        )
    task = next((entry.message.content for entry in entries if entry.message.role == "user"), None)
    if task is None:
        raise BadRow("messages must hold a user message, got none. Add the task as one.")
    check_tools(row.tools or [])
    opening = tuple(entry.message for entry in entries[: trained[0]])
    return Conversation(opening, _turns(entries[trained[0] :]), row.tools or [], task, row.reward, row.success)


def _turns(entries: Sequence[TeacherMessage]) -> tuple[tuple[TeacherMessage, tuple[Message, ...]], ...]:
    """Each reply with the messages after it. The entries begin with a reply."""
    turns: list[tuple[TeacherMessage, tuple[Message, ...]]] = []
    for entry in entries:
        if entry.message.role != "assistant":
            reply, answers = turns[-1]
            turns[-1] = reply, (*answers, entry.message)
        elif turns and not turns[-1][1]:
            raise BadRow("messages must hold no two replies of the assistant in a row, got some. Join them into one.")
        else:
            turns.append((entry, ()))
    return tuple(turns)


def _entry(index: int, given: _Given, ignored: Counter[str]) -> TeacherMessage:
    ignored.update(f"messages.{name}" for name in given.keys() - _READ - {"weight", *_WITHOUT_TOKENS})
    where = f"messages[{index}]"
    for name in _WITHOUT_TOKENS:
        if given.get(name):
            raise BadRow(f"{where}.{name} must be empty, got a value. Use tool_calls or content.")
    weight = given.get("weight", 1)
    if weight not in (0, 1):
        raise BadRow(f"{where}.weight must be 0 or 1, got {shortened(weight)}.")
    message = read_message(index, {name: value for name, value in given.items() if name in _READ})
    return TeacherMessage(message, bool(weight))


class TooLong(BadRow):
    """The conversation is longer than the context."""


def record_conversation(
    conversation: Conversation,
    renderer: Renderer,
    *,
    max_tokens: int,
    parser: ReplyParser | None = None,
    strategy: Strategy | None = None,
) -> ContextManager:
    """The context of an episode in which the policy gave the replies of a conversation. Replies of weight 0 are shown,
    not trained.

    `parser` reads each reply back from its tokens; None: the template's own parser. Raises BadRow (TooLong if it is too
    long) and RenderError.
    """
    conversation = conversation.with_messages(renderer.template.with_call_ids(conversation.messages))
    given = KnownReply()
    shown = {turn for turn, (reply, _) in enumerate(conversation.turns) if not reply.trained}
    context = ContextManager(renderer, given, max_tokens=max_tokens, strategy=strategy, untrained_turns=shown)
    context.begin(conversation.opening, conversation.tools)
    for reply, answers in conversation.turns:
        given.message = reply.message
        ids = renderer.reply(context.prompt, reply.message, parser)
        stopped = CONTEXT_FULL if len(ids) > context.room else None
        if stopped is None:
            context.record_reply(ids, [math.nan] * len(ids), policy_version=0)
            stopped = context.observe(answers) if answers else None
        if stopped == CONTEXT_FULL:
            raise TooLong("conversation must fit context.max_tokens, got a longer one. Raise it, or leave the row out.")
        if stopped is not None:
            raise BadRow(
                f"conversation must fit the chat template and context.strategy, got {stopped}: {context.problem}"
            )
        if context.question:
            raise BadRow(
                "context.strategy must ask the policy no questions, for demonstrations hold no answers to them, got "
                f"{type(strategy).__name__}. Set context.strategy: linear."
            )
    return context
