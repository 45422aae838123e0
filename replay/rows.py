"""Records as table rows, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any, TypeVar

import sqlalchemy as sa

from context.messages import Message, ToolCall
from context.tokens import Segment
from replay.blobs import decode_tokens, encode_tokens
from replay.records import GroupRecord, Trajectory, TrajectoryRecord
from replay.schema import groups, segments, trajectories

Row = dict[str, Any]
Key = TypeVar("Key")

_MOST_PARAMETERS = 500
_LOG_PROB_FIELDS = ("mean_behavior_log_prob", "min_behavior_log_prob")

_RECORD_FIELDS = [field.name for field in fields(TrajectoryRecord)]
_LOG_PROB_POSITIONS = [_RECORD_FIELDS.index(name) for name in _LOG_PROB_FIELDS]
RECORD_COLUMNS = [trajectories.c[name] for name in _RECORD_FIELDS]
GROUP_COLUMNS = [groups.c[field.name] for field in fields(GroupRecord)]
BLOBS = ("token_ids", "authors", "behavior_log_probs", "policy_versions")
SEGMENT_COLUMNS = [segments.c[name] for name in ("reason", "behavior_context", "num_tokens", *BLOBS)]


def now() -> str:
    """For people. Nothing is ordered by it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def chunked(keys: Sequence[Key]) -> Iterator[Sequence[Key]]:
    """Databases limit the parameters of one statement."""
    for start in range(0, len(keys), _MOST_PARAMETERS):
        yield keys[start : start + _MOST_PARAMETERS]


def known(value: float | None) -> float | None:
    """NaN is no number a column should hold: unknown is NULL."""
    return None if value is None or math.isnan(value) else value


def record_row(record: TrajectoryRecord) -> Row:
    return {**vars(record), **{name: known(getattr(record, name)) for name in _LOG_PROB_FIELDS}}


def record_of(row: Sequence[Any]) -> TrajectoryRecord:
    """From the values of RECORD_COLUMNS."""
    values = list(row)
    for position in _LOG_PROB_POSITIONS:
        if values[position] is None:
            values[position] = math.nan
    return TrajectoryRecord(*values)


def segment_rows(trajectory: str, parts: Sequence[Segment]) -> Iterator[Row]:
    for position, segment in enumerate(parts):
        yield {
            "trajectory": trajectory,
            "position": position,
            "reason": segment.reason,
            "behavior_context": segment.behavior_context,
            "num_tokens": len(segment.tokens),
            **encode_tokens(segment.tokens),
        }


def segment_of(row: Sequence[Any]) -> Segment:
    """From the values of SEGMENT_COLUMNS. Raises BlobError where a blob is not what was written."""
    reason, behavior_context, count, *blobs = row
    return Segment(decode_tokens(blobs, count), reason, behavior_context)


def message_rows(trajectory: Trajectory) -> Iterator[Row]:
    for position, message in enumerate(trajectory.messages):
        yield {
            "trajectory": trajectory.id,
            "position": position,
            "author": message.author,
            "role": message.role,
            "content": message.content,
            "tool_calls": _calls_to_json(message.tool_calls) if message.tool_calls else None,
            "name": message.name,
            "tool_call_id": message.tool_call_id,
            "reasoning": message.reasoning,
        }


def message_of(row: sa.RowMapping) -> Message:
    calls = json.loads(row["tool_calls"]) if row["tool_calls"] is not None else ()
    return Message(
        role=row["role"],
        content=row["content"],
        author=row["author"],
        tool_calls=tuple(ToolCall(**call) for call in calls),
        name=row["name"],
        tool_call_id=row["tool_call_id"],
        reasoning=row["reasoning"],
    )


def _calls_to_json(calls: Iterable[ToolCall]) -> str:
    rows = [{"name": call.name, "arguments": dict(call.arguments), "id": call.id} for call in calls]
    return json.dumps(rows, separators=(",", ":"))
