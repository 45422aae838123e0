"""What a trajectory was asked and what it answered last, in few words: what tells the rows of a list apart."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

import sqlalchemy as sa

from context.authors import HISTORY
from context.messages import Message
from context.wording import excerpt
from replay.queries.filters.query import QueryResult
from replay.storage.format.encoding import BlobError
from replay.storage.format.message_json import messages_of
from replay.storage.format.schema import messages
from replay.storage.statements import selected
from replay.store import ReplayStore

MOST = 200
"""Characters of either."""
_READ = 8 * MOST
"""Characters of which the first are taken, once ends of lines and rows of spaces have become one space."""
NONE: QueryResult = {"prompt": None, "answer": None}


def excerpts(store: ReplayStore, ids: Sequence[str]) -> dict[str, QueryResult]:
    """`prompt` and `answer` by the ids of trajectories, whether they are stored or not: see `excerpts_of`."""
    with store.reading() as connection:
        found = excerpts_of(connection, ids)
    return {id: found.get(id, NONE) for id in ids}


def excerpts_of(connection: sa.Connection, ids: Sequence[str]) -> dict[str, QueryResult]:
    """By id, of the rows whose messages are stored.

    `prompt`: the last message of a user before the policy's first reply. `answer`: its last reply; where that only
    called tools, the calls. None where nothing of the kind was said, or where it does not read as it was written, which
    `replay verify` finds.
    """
    columns = (messages.c.trajectory, messages.c.num_messages, messages.c.said, messages.c.checksum)
    found = {}
    for row in selected(connection, columns, messages.c.trajectory, ids):
        try:
            found[row.trajectory] = in_few_words(messages_of(row.num_messages, row.said, row.checksum))
        except BlobError:
            found[row.trajectory] = NONE
    return found


def in_few_words(conversation: Sequence[Message]) -> QueryResult:
    asked = list(opening(conversation))
    prompt = next((message for message in reversed(asked) if message.role == "user"), None) or (
        asked[-1] if asked else None
    )
    answers = [message for message in conversation if _is_reply(message)]
    return {
        "prompt": None if prompt is None else in_one_line(prompt.content),
        "answer": in_one_line(_answer(answers[-1])) if answers else None,
    }


def opening(conversation: Iterable[Message]) -> Iterator[Message]:
    """All before the policy's first reply; what an assistant of the task's own history said is among it."""
    for message in conversation:
        if _is_reply(message):
            return
        yield message


def in_one_line(text: str, most: int = MOST) -> str:
    return excerpt(" ".join(text[:_READ].split()), most)


def _is_reply(message: Message) -> bool:
    return message.role == "assistant" and message.author != HISTORY


def _answer(reply: Message) -> str:
    calls = (f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})" for call in reply.tool_calls)
    return reply.content.strip() or " ".join(calls) or (reply.reasoning or "")
