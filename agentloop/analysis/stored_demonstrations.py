"""What a run did well, as conversations that `agentloop sft` reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from agentloop.environments import RunEnvironments
from context.authors import LLM
from context.messages import Message, to_template
from replay.exchange.files import packed, replaced
from replay.exchange.stored_rows import NotExported, bundles, exportable
from replay.records import StopReason, Trajectory
from replay.storage.format.schema import trajectories
from replay.store import ReplayStore


@dataclass
class Written:
    """How many conversations are in the file, and how many rows are not."""

    conversations: int = 0
    of_another_environment: int = 0
    """Or of another version of it: the tools that they were shown are not known."""


def write_demonstrations(
    store: ReplayStore,
    environments: RunEnvironments,
    file: Path,
    *,
    run: str | None,
    where: sa.ColumnElement[bool],
    limit: int | None = None,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Written:
    """Rows that ended with an answer, a line each in OpenAI's chat format, with the tools that they were shown.

    Replies that the run did not train on have weight 0, so `sft` only shows them. Tokens and log-probs are left behind.
    """
    found, left = Written(), NotExported()
    answered = trajectories.c.stop_reason == StopReason.ANSWERED
    with replaced(file, force=force) as target, packed(file, target) as stream:
        ids = exportable(store, left, run=run, where=sa.and_(answered, where))[:limit]
        for done, bundle in enumerate(bundles(store, ids, left), 1):
            tools = _tools(environments, bundle.trajectory)
            if tools is None:
                found.of_another_environment += 1
                continue
            row = {"messages": list(_said(bundle.trajectory)), "tools": tools}
            outcome = {"reward": bundle.trajectory.record.reward, "success": bundle.trajectory.record.success}
            stream.write(json.dumps(row | outcome).encode() + b"\n")
            found.conversations += 1
            progress(done, len(ids))
    return found


def _tools(environments: RunEnvironments, row: Trajectory) -> list[dict[str, Any]] | None:
    factory = environments.recorded(row.record.environment, row.record.environment_version)
    return None if factory is None else [dict(tool) for tool in factory.tools]


def _said(row: Trajectory) -> Iterator[dict[str, Any]]:
    for message in row.messages:
        yield to_template(message) | ({} if _is_trained(message) else {"weight": 0})


def _is_trained(message: Message) -> bool:
    return message.role != "assistant" or message.author == LLM
