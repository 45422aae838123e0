"""What a run did well, as conversations that `agentloop sft` reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from agentloop.environments import RunEnvironments
from context.authors import LLM
from context.messages import Message, to_template
from replay.exchange import ExportReport, export_file
from replay.exchange.row_format import Bundle
from replay.records import StopReason
from replay.storage.format.schema import trajectories as rows
from replay.store import ReplayStore


def write_demonstrations(
    store: ReplayStore,
    environments: RunEnvironments,
    file: Path,
    *,
    where: sa.ColumnElement[bool],
    limit: int | None = None,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ExportReport:
    """Rows that ended with an answer, a line each in OpenAI's chat format, with the tools that they were shown.

    Replies that are not the policy's, as examples in a prompt, have weight 0, so `sft` only shows them. Tokens and
    log-probs are left behind, and so are rows of another environment or version, whose tools are not known. Raises
    ReplayError for a file that can't be written.
    """
    known = [
        sa.and_(rows.c.environment == one.name, rows.c.environment_version == one.version) for one in environments.all
    ]
    answered = rows.c.stop_reason == StopReason.ANSWERED

    def line_of(bundle: Bundle) -> bytes:
        record = bundle.trajectory.record
        factory = environments.recorded(record.environment, record.environment_version)
        assert factory is not None  # else it was not asked for
        row = {
            "messages": [_message(message) for message in bundle.trajectory.messages],
            "tools": factory.tools,
            "reward": record.reward,
            "success": record.success,
        }
        return json.dumps(row).encode()

    asked = sa.and_(answered, sa.or_(*known), where)
    return export_file(store, file, where=asked, limit=limit, force=force, line_of=line_of, progress=progress)


def _message(message: Message) -> dict[str, Any]:
    is_trained = message.role != "assistant" or message.author == LLM
    return to_template(message) | ({} if is_trained else {"weight": 0})
