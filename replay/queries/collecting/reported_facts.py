"""What workers and engines say of themselves: anybody may write there, so a fact of another kind is unknown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa

from context.wording import excerpt
from replay.queries.filters.query import QueryResult
from replay.storage.collecting.participants import TABLES, list_participants
from replay.ticket_records import Participant

_LONGEST = 300
_GREATEST = 2**53


def text(value: Any) -> str | None:
    return excerpt(value, _LONGEST) if isinstance(value, str) and value else None


def whole(value: Any) -> int | None:
    return value if type(value) is int and abs(value) < _GREATEST else None


def real(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and math.isfinite(value) and abs(value) < _GREATEST else None


Kinds = Mapping[str, Callable[[Any], Any]]
_WORKER: Kinds = {
    **dict.fromkeys(("host", "state", "code_version"), text),
    **dict.fromkeys(("pid", "concurrency", "in_flight", "done", "failed", "tool_errors"), whole),
}
_ENGINE: Kinds = {
    **dict.fromkeys(("state", "label", "adapter", "model"), text),
    "version": whole,
    "difference": real,
}


def workers(connection: sa.Connection, run: str, held: Mapping[str, int], *, lease_s: float) -> list[QueryResult]:
    """All that did not leave; `leased` are the tickets that are in its hands, whatever it says."""
    listed = list_participants(connection, TABLES["worker"], run)
    return [{**_known(each, _WORKER), "leased": held.get(each.id, 0), "gone": each.is_gone(lease_s)} for each in listed]


def engines(connection: sa.Connection, run: str) -> list[QueryResult]:
    """With the proof of the weights they serve: `difference` is the root mean square of probed log-probs, in nats."""
    return [_known(each, _ENGINE) for each in list_participants(connection, TABLES["engine"], run)]


def _known(participant: Participant, kinds: Kinds) -> QueryResult:
    facts = {name: kind(participant.facts.get(name)) for name, kind in kinds.items()}
    silent, age = max(0.0, participant.silent_s), max(0.0, participant.age_s)
    return {"id": participant.id, **facts, "silent_s": silent, "age_s": age}
