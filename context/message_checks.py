"""Messages from outside: the first ones of an episode, and what comes back after a reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from context.authors import INITIALIZATION, USER, AuthorTable
from context.messages import Message


def admitted(messages: Sequence[Message], authors: AuthorTable, *, opening: bool) -> list[Message]:
    """The messages by the authors whose tokens theirs will be; raises ValueError for one that can't have written it.

    An assistant message that names no author was not sampled: `initialization`. In the `opening`, an action author
    may speak in the policy's place, unless its tokens come with log-probs: those are sampled, never rendered.
    """
    rows = []
    for message in messages:
        if message.role == "assistant" and message.author == USER:  # what a Message says that names no author
            message = replace(message, author=INITIALIZATION)
        author = authors.author(message.author)
        if author.behavior or (author.action and not opening):
            where = "given" if author.behavior else "later"
            raise ValueError(
                f"messages.author must not be one whose tokens are sampled, got {message.author!r} "
                f"for a {where} {message.role} message. Use {INITIALIZATION!r}."
            )
        if author.action and message.role != "assistant":
            raise ValueError(
                f"messages.role must be assistant for author {message.author!r}, who speaks in the policy's place "
                f"(action: true), got {message.role!r}. Change the role, or use an author with action: false."
            )
        rows.append(message)
    return rows


def visible(messages: Sequence[Message], authors: AuthorTable) -> tuple[Message, ...]:
    """Those that prompts show."""
    return tuple(message for message in messages if authors.author(message.author).shown)
