"""One exchanged row: a trajectory with everything it refers to, as plain columns and lists.

Every row is complete in itself: rows can be cut, shuffled and joined with any tool. What has no fixed shape (a run's
configuration, a task's payload, a call's arguments) is JSON text, so that all rows have one schema.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from context.authors import AuthorTable
from context.messages import Message, ToolCall, canonical_json
from context.tokens.token_sequence import Segment, TokenSequence
from replay.exchange.strict_json import NotStrict, free_form, loads, shortened
from replay.records import GroupRecord, PolicyRecord, RunRecord, TaskRecord, Trajectory, TrajectoryRecord

FORMAT = 2
"""Raised when a column changes its meaning, or one is added or goes."""


PlainRow = dict[str, Any]
_Value = TypeVar("_Value")


class BadRow(ValueError):
    """What is wrong with a row of a file, in one line."""


@dataclass(frozen=True)
class Bundle:
    """A trajectory with everything it refers to."""

    trajectory: Trajectory
    group: GroupRecord
    task: TaskRecord
    run: RunRecord
    policies: tuple[PolicyRecord, ...]
    """Those that sampled it or had its tokenizer, as far as the run told."""


@dataclass(frozen=True)
class Column:
    """Of a row, or of one of its parts."""

    name: str
    kind: str
    """str | int | float | bool, `list` for parts, or the type of an array's numbers."""
    optional: bool = False


def _columns(record: type, *, prefix: str = "", skip: Sequence[str] = ()) -> list[Column]:
    found = []
    for field in fields(record):
        kind, _, optional = str(field.type).partition(" | ")
        unknown = bool(optional) or field.name in _NAN_IS_NULL
        if field.name not in skip:
            found.append(Column(prefix + field.name, kind, unknown))
    return found


_NAN_IS_NULL = ("mean_behavior_log_prob", "min_behavior_log_prob")
_OF_TRAJECTORY = ("id", "run", "task", "iteration")
"""Fields of a group that are its members' too."""
RECORD_COLUMNS = _columns(TrajectoryRecord)
GROUP_COLUMNS = _columns(GroupRecord, prefix="group_", skip=_OF_TRAJECTORY)
COLUMNS = [
    Column("format", "int"),
    *RECORD_COLUMNS,
    *GROUP_COLUMNS,
    *(Column(f"task_{name}", "str") for name in ("environment", "payload")),
    *(Column(f"run_{name}", "str") for name in ("name", "config", "authors", "authors_hash", "code_version")),
    Column("run_fingerprint", "str", optional=True),
    Column("messages_hash", "str"),
    *(Column(name, "list") for name in ("policies", "segments", "messages")),
]
PARTS = {
    "policies": [Column("version", "int"), Column("tokenizer_hash", "str"), Column("template_hash", "str")],
    "segments": [
        Column("reason", "str"),
        Column("behavior_context", "str"),
        Column("token_ids", "int32"),
        Column("authors", "uint8"),
        Column("behavior_log_probs", "float32"),
        Column("policy_versions", "int32"),
    ],
    "messages": [
        Column("author", "str"),
        Column("role", "str"),
        Column("content", "str"),
        Column("tool_calls", "list"),
        Column("name", "str", optional=True),
        Column("tool_call_id", "str", optional=True),
        Column("reasoning", "str", optional=True),
        Column("note", "str"),
    ],
    "tool_calls": [Column("name", "str"), Column("arguments", "str"), Column("id", "str", optional=True)],
}
ARRAYS = ("token_ids", "authors", "behavior_log_probs", "policy_versions")


def to_plain(bundle: Bundle) -> PlainRow:
    """The row's columns in order; arrays of tokens stay arrays, NaN in them unknown."""
    record, group, run = bundle.trajectory.record, bundle.group, bundle.run
    row: PlainRow = {"format": FORMAT}
    for column in RECORD_COLUMNS:
        value = getattr(record, column.name)
        row[column.name] = None if column.name in _NAN_IS_NULL and math.isnan(value) else value
    row |= {column.name: getattr(group, column.name.removeprefix("group_")) for column in GROUP_COLUMNS}
    row |= {"task_environment": bundle.task.environment, "task_payload": canonical_json(bundle.task.payload)}
    row |= {
        "run_name": run.name,
        "run_config": json.dumps(dict(run.config)),
        "run_authors": run.authors,
        "run_authors_hash": run.authors_hash,
        "run_code_version": run.code_version,
        "run_fingerprint": None if run.fingerprint is None else canonical_json(run.fingerprint),
    }
    row["policies"] = [{c.name: getattr(policy, c.name) for c in PARTS["policies"]} for policy in bundle.policies]
    row["segments"] = [
        {"reason": part.reason, "behavior_context": part.behavior_context}
        | {name: getattr(part.tokens, name) for name in ARRAYS}
        for part in bundle.trajectory.segments
    ]
    row["messages"] = [_plain_message(message) for message in bundle.trajectory.messages]
    row["messages_hash"] = _messages_hash(row["messages"])
    return row


def _messages_hash(messages: Sequence[object]) -> str:
    """sha256 of their JSON, whatever the order of its keys: what people read is bound to the row as tokens are."""
    return hashlib.sha256(json.dumps(messages, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _plain_message(message: Message) -> PlainRow:
    calls = [
        {"name": call.name, "arguments": json.dumps(dict(call.arguments), separators=(",", ":")), "id": call.id}
        for call in message.tool_calls
    ]
    return {c.name: calls if c.name == "tool_calls" else getattr(message, c.name) for c in PARTS["messages"]}


def from_plain(row: object) -> Bundle:
    """The bundle of a row that anybody may have written; raises BadRow. What the store checks is left to it."""
    given = _part(row, COLUMNS, "row")
    if given["format"] != FORMAT:
        raise BadRow(f"format must be {FORMAT}, got {given['format']}. It was written by another agentloop.")
    values = {c.name: given[c.name] for c in RECORD_COLUMNS}
    values |= {name: math.nan for name in _NAN_IS_NULL if values[name] is None}
    record = TrajectoryRecord(**values)
    messages = tuple(_message(part, f"messages[{i}]") for i, part in enumerate(given["messages"]))
    if given["messages_hash"] not in ("", digest := _messages_hash(given["messages"])):
        raise BadRow(
            f"messages_hash must be that of the messages ({digest}), got {shortened(given['messages_hash'])}. "
            "They were changed after they were exported; empty it to import them as they are."
        )
    run = _run(record.run, *(given[f"run_{name}"] for name in _RUN_TEXTS))
    return Bundle(
        Trajectory(
            record,
            tuple(_segment(part, f"segments[{i}]") for i, part in enumerate(given["segments"])),
            messages,
        ),
        GroupRecord(
            id=record.group,
            run=record.run,
            task=record.task,
            iteration=record.iteration,
            **{c.name.removeprefix("group_"): given[c.name] for c in GROUP_COLUMNS},
        ),
        TaskRecord(record.task, given["task_environment"], _object(given["task_payload"], "task_payload")),
        run,
        tuple(_policy(record.run, part, f"policies[{i}]") for i, part in enumerate(given["policies"])),
    )


_RUN_TEXTS = ("name", "config", "authors", "authors_hash", "code_version", "fingerprint")


@lru_cache(maxsize=64)
def _run(
    id: str, name: str, config: str, authors: str, authors_hash: str, code_version: str, fingerprint: str | None
) -> RunRecord:
    """Every row of a run says the same about it."""
    if hashlib.sha256(authors.encode("utf-8", "surrogatepass")).hexdigest() != authors_hash:
        raise BadRow(f"run_authors_hash must be that of run_authors, got {shortened(authors_hash)}.")
    author_table(authors)
    made = None if fingerprint is None else _object(fingerprint, "run_fingerprint")
    return RunRecord(id, name, _object(config, "run_config", constants=True), authors, authors_hash, code_version, made)


@lru_cache(maxsize=64)
def author_table(text: str) -> AuthorTable:
    try:
        loads(text)
        table = AuthorTable.from_json(text)
    except (NotStrict, TypeError, ValueError, AttributeError) as error:
        raise BadRow(f"run_authors must be an author table, got one that is not ({shortened(str(error))}).") from None
    for author in table.authors:
        flags = (author.action, author.trained, author.shown, author.behavior)
        if not isinstance(author.name, str) or not all(isinstance(flag, bool) for flag in flags):
            raise BadRow(f"run_authors must hold names and true or false, got {shortened(author)}.")
    return table


def _policy(run: str, part: object, where: str) -> PolicyRecord:
    given = _part(part, PARTS["policies"], where)
    # A snapshot's path would be looked for in the folder of a run that is not this one.
    return PolicyRecord(run, given["version"], None, given["tokenizer_hash"], given["template_hash"])


def _segment(part: object, where: str) -> Segment:
    given = _part(part, PARTS["segments"], where)
    try:
        return Segment(TokenSequence(*(given[name] for name in ARRAYS)), given["reason"], given["behavior_context"])
    except ValueError as error:
        raise BadRow(f"{where}.{error}") from None


def _message(part: object, where: str) -> Message:
    given = _part(part, PARTS["messages"], where)
    return Message(
        **given | {"tool_calls": tuple(_call(call, f"{where}.tool_calls[{i}]") for i, call in _numbered(given))}
    )


def _numbered(message: PlainRow) -> enumerate[object]:
    return enumerate(message["tool_calls"])


def _call(part: object, where: str) -> ToolCall:
    given = _part(part, PARTS["tool_calls"], where)
    return ToolCall(given["name"], _object(given["arguments"], f"{where}.arguments", constants=True), given["id"])


def _object(text: str, where: str, *, constants: bool = False) -> dict[str, Any]:
    try:
        return free_form(text, constants=constants)
    except NotStrict as error:
        raise BadRow(f"{where} must {error}.") from None


def _part(value: object, columns: Sequence[Column], where: str) -> PlainRow:
    """The columns of a row, each of its type."""
    if not isinstance(value, Mapping):
        raise BadRow(f"{where} must be an object, got {shortened(value)}.")
    names = [column.name for column in columns]
    for name in value:
        if name not in names:
            nearest = difflib.get_close_matches(str(name), names, 1)
            advice = f" Did you mean {nearest[0]!r}?" if nearest else ""
            raise BadRow(f"{where} must hold known columns, got {shortened(name)}.{advice}")
    found: PlainRow = {}
    inside = "" if where == "row" else f"{where}."
    for column in columns:
        if column.name not in value:
            raise BadRow(f"{where} must hold {column.name!r}, got none.")
        found[column.name] = _typed(value[column.name], column, inside + column.name)
    return found


def _typed(value: Any, column: Column, where: str) -> Any:
    if value is None and column.optional:
        return None
    if column.kind in DTYPES:
        return _array(value, column.kind, where)
    keeps, convert = _KINDS[column.kind]
    if not keeps(value):
        raise BadRow(f"{where} must be of type {column.kind}, got {shortened(value)}.")
    try:
        return convert(value)
    except OverflowError:
        raise BadRow(f"{where} must be finite, got {shortened(value)}.") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _same(value: _Value) -> _Value:
    return value


_KINDS: dict[str, tuple[Callable[[Any], bool], Callable[[Any], Any]]] = {
    "str": (lambda value: isinstance(value, str), _same),
    "bool": (lambda value: isinstance(value, bool), _same),
    "int": (lambda value: isinstance(value, int) and not isinstance(value, bool), _same),
    "float": (_is_number, float),
    "list": (lambda value: isinstance(value, list), _same),
}
DTYPES = {"int32": np.int32, "uint8": np.uint8, "float32": np.float32}


def _array(value: Any, kind: str, where: str) -> npt.NDArray[Any]:
    """A list of numbers, null for an unknown one, as an array; an array stays as it is."""
    dtype = DTYPES[kind]
    if isinstance(value, np.ndarray):
        return value
    allowed = {int, float, type(None)} if kind == "float32" else {int}
    if not isinstance(value, list) or not set(map(type, value)) <= allowed:
        raise BadRow(f"{where} must be a list of {kind}, got {shortened(value)}.")
    try:
        if kind == "float32":
            with np.errstate(over="ignore"):
                return np.array([math.nan if number is None else number for number in value], np.float64).astype(dtype)
        return np.array(value, dtype)
    except OverflowError:
        raise BadRow(f"{where} must hold numbers of {kind}, got one beyond them.") from None
