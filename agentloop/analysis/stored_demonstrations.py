"""Writes conversations as `agentloop sft` reads them: stored rows, or what an environment demonstrates."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentloop.environments import RunEnvironments
from context.authors import LLM
from context.messages import Message, to_template
from context.tokens.session_segments import conversations_of
from replay.exchange import ExportReport, export_file
from replay.exchange.row_format import Bundle
from replay.exchange.stored_rows import whole_with_known_tools
from replay.questions import RowCondition
from replay.store import ReplayStore


def write_demonstrations(
    store: ReplayStore,
    environments: RunEnvironments | None,
    file: Path,
    *,
    where: RowCondition,
    limit: int | None = None,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ExportReport:
    """Write rows that ended with an answer, one line each, in OpenAI's chat format with their tools.

    An agent's session has one line per training sequence. Replies that are not the policy's, or that another line
    trains, have weight 0: `sft` only shows them. Rows of another environment or version are left out, because their
    tools are not known; sessions hold their own tools. Raises ReplayError for a file that can't be written.
    """
    known = [] if environments is None else [(one.name, one.version) for one in environments.all]

    def line_of(bundle: Bundle) -> bytes:
        row, record = bundle.trajectory, bundle.trajectory.record
        outcome = {"reward": record.reward, "success": record.success}
        if row.nodes:
            conversations = [*conversations_of(row.nodes)]
        else:
            factory = environments and environments.recorded(record.environment, record.environment_version)
            assert factory  # the query takes known environments alone
            own = bundle.task.tools
            conversations = [(row.messages, list(factory.tools) if own is None else json.loads(own))]
        return "\n".join(json.dumps(conversation_row(said, tools) | outcome) for said, tools in conversations).encode()

    asked = where & whole_with_known_tools(known)
    return export_file(store, file, where=asked, limit=limit, force=force, line_of=line_of, progress=progress)


def conversation_row(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A conversation in OpenAI's chat format, without what the environment said after the end: nobody answered it."""
    last = max(place for place, message in enumerate(messages) if message.role == "assistant")
    return {"messages": [*map(_message, messages[: last + 1])], "tools": tools}


def _message(message: Message) -> dict[str, Any]:
    is_trained = message.role != "assistant" or message.author == LLM
    return to_template(message) | ({} if is_trained else {"weight": 0})
