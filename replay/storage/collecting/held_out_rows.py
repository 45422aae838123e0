"""Episodes of evaluations: written, let go, taken back. Nothing here is ever drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import sqlalchemy as sa

from replay.records import HeldOutEpisode
from replay.storage.format.message_json import conversation_row
from replay.storage.format.rows import Row, chunked
from replay.storage.format.schema import held_out
from replay.storage.statements import insert
from replay.storage.validate import checked

ALL_RUNS = "*"
SAID = ("num_messages", "said", "checksum")
"""Columns that hold the messages: see `message_json.conversation_row`."""
FACTS = tuple(field.name for field in fields(HeldOutEpisode) if field.name != "messages")


def put(connection: sa.Connection, episodes: Sequence[HeldOutEpisode], *, compressed: bool) -> None:
    """In place of those that stood in their places."""
    checked(episodes, "held-out episode", "number")
    for episode in episodes:
        here = (held_out.c[name] == getattr(episode, name) for name in ("run", "iteration", "number"))
        connection.execute(held_out.delete().where(*here))
    for chunk in chunked(episodes):
        insert(connection, held_out, [_row(episode, compressed=compressed) for episode in chunk])


def _row(episode: HeldOutEpisode, *, compressed: bool) -> Row:
    said, _ = conversation_row("", episode.messages, compressed=compressed)
    return {name: getattr(episode, name) for name in FACTS} | {name: said[name] for name in SAID}


def keep_newest(connection: sa.Connection, run: str, evaluations: int) -> None:
    """Let go of all but a run's newest evaluations."""
    made = sa.select(held_out.c.iteration).where(held_out.c.run == run).distinct()
    iterations = list(connection.scalars(made.order_by(held_out.c.iteration.desc())))
    for iteration in iterations[evaluations:]:
        connection.execute(held_out.delete().where(held_out.c.run == run, held_out.c.iteration == iteration))


def remove(connection: sa.Connection, run: str, *, dry_run: bool) -> int:
    """Delete the episodes of one run, or of ALL_RUNS, or only count them; how many they are."""
    mine = sa.true() if run == ALL_RUNS else held_out.c.run == run
    if not dry_run:
        return connection.execute(held_out.delete().where(mine)).rowcount
    return connection.scalar(sa.select(sa.func.count()).select_from(held_out).where(mine)) or 0
