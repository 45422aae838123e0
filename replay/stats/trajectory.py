"""One trajectory whole."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from context.authors import AuthorTable
from replay import schema
from replay.blobs import decode_log_probs
from replay.errors import ReplayError
from replay.read import load
from replay.records import COMMITTED, Trajectory
from replay.rows import known
from replay.schema import draws, groups, runs, tasks, token_scores
from replay.stats.rows import Answer
from replay.store import ReplayStore

_rows = schema.trajectories.c


def find(store: ReplayStore, id_prefix: str) -> str:
    """The one trajectory whose id is this, or begins so."""
    begins = sa.func.substr(_rows.id, 1, len(id_prefix)) == id_prefix
    with store.reading() as connection:
        found = connection.scalars(sa.select(_rows.id).where(begins).order_by(_rows.id).limit(3)).all()
    if id_prefix and (len(found) == 1 or id_prefix in found):
        return str(found[0])
    which = "none" if not found else "more than one: " + ", ".join(found)
    raise ReplayError(
        f"ID must be the beginning of one trajectory's id, got {id_prefix!r}, which begins {which}. "
        "See: agentloop replay ls"
    )


def trajectory(store: ReplayStore, id_prefix: str) -> Answer:
    """One trajectory whole: its record, tokens, messages, and every update that used it.

    Without tokens where these were evicted. Raises CorruptTrajectory where they are not what was written.
    """
    id = find(store, id_prefix)
    with store.reading() as connection:
        loaded = load(connection, [id])
        found = loaded.gone[id].trajectory if id in loaded.gone else loaded.in_order([id])[0]
        reason = connection.scalar(sa.select(_rows.state_reason).where(_rows.id == id))
        authors = connection.scalar(sa.select(runs.c.authors).where(runs.c.id == found.record.run))
        used = (draws.c.trajectory == id) & (draws.c.state == COMMITTED)
        query = sa.select(draws).where(used).order_by(draws.c.run, draws.c.iteration, draws.c.slot)
        uses = [dict(row) for row in connection.execute(query).mappings()]
        group = connection.execute(sa.select(groups).where(groups.c.id == found.record.group)).mappings().one()
        scored = connection.execute(sa.select(token_scores).where(token_scores.c.trajectory == id)).mappings().all()
        task = connection.execute(sa.select(tasks).where(tasks.c.hash == found.record.task)).mappings().one()
    record = {name: known(value) if isinstance(value, float) else value for name, value in vars(found.record).items()}
    return {
        **record,
        "state_reason": reason,
        "group": dict(group),
        "task": dict(task),
        "segments": _segments(found, AuthorTable.from_json(authors or "[]"), scored),
        "messages": [_message(found, position) for position in range(len(found.messages))],
        "uses": uses,
    }


def _segments(found: Trajectory, authors: AuthorTable, scored: Sequence[sa.RowMapping]) -> list[Answer]:
    answers: list[Answer] = []
    scores = {row["position"]: row for row in scored}
    for position, segment in enumerate(found.segments):
        tokens = segment.tokens
        score = scores.get(position)
        current = None if score is None else decode_log_probs(score["log_probs"], len(tokens)).tolist()
        answers.append(
            {
                "reason": segment.reason,
                "token_ids": tokens.token_ids.tolist(),
                "authors": [authors.name(code) for code in tokens.authors.tolist()],
                "loss_mask": authors.is_trained(tokens.authors).tolist(),
                "behavior_log_probs": [known(value) for value in tokens.behavior_log_probs.tolist()],
                "policy_versions": tokens.policy_versions.tolist(),
                "current_log_probs": None if current is None else [known(value) for value in current],
                "scored_by": None
                if score is None
                else {"run": score["run"], "policy_version": score["policy_version"]},
            }
        )
    return answers


def _message(found: Trajectory, position: int) -> Answer:
    message = found.messages[position]
    calls = [{**vars(call), "arguments": dict(call.arguments)} for call in message.tool_calls]
    return {**vars(message), "tool_calls": calls}
