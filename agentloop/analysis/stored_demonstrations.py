"""Writes conversations as `agentloop sft` reads them: stored rows, or what an environment demonstrates."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agentloop.environments import RunEnvironments
from context.authors import LLM
from context.messages import Message, to_template
from context.tokens.session_segments import conversations_of
from replay.exchange import ExportReport, export_file
from replay.exchange.row_format import Bundle, Tools
from replay.exchange.stored_rows import whole_with_known_tools
from replay.questions import RowCondition
from replay.store import ReplayStore


def write_demonstrations(
    store: ReplayStore,
    environments: RunEnvironments | None,
    file: Path,
    *,
    where: RowCondition,
    force: bool = False,
    unique: bool = False,
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
            conversations: list[tuple[Sequence[Message], Tools]] = [*conversations_of(row.nodes)]
        else:
            assert bundle.tools is not None  # the query takes known environments alone
            conversations = [(row.messages, bundle.tools)]
        return "\n".join(json.dumps(conversation_row(said, tools) | outcome) for said, tools in conversations).encode()

    asked = where & whole_with_known_tools(known)
    written: dict[str, Any] = {"force": force, "unique": unique, "progress": progress}
    tools_of = partial(offered_tools, environments)
    return export_file(store, file, where=asked, line_of=line_of, tools_of=tools_of, **written)


def offered_tools(environments: RunEnvironments | None, bundle: Bundle) -> Tools | None:
    """What the policy of a row was offered. None: the row is of an environment or version that is not among these."""
    record = bundle.trajectory.record
    factory = environments and environments.recorded(record.environment, record.environment_version)
    return bundle.tools if factory is None or bundle.tools is not None else list(factory.tools)


def conversation_row(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A conversation in OpenAI's chat format, without what the environment said after the end: nobody answered it."""
    last = max(place for place, message in enumerate(messages) if message.role == "assistant")
    return {"messages": [*map(_message, messages[: last + 1])], "tools": tools}


def _message(message: Message) -> dict[str, Any]:
    is_trained = message.role != "assistant" or message.author == LLM
    return to_template(message) | ({} if is_trained else {"weight": 0})
