"""The format of one exchanged row: a trajectory with everything it refers to, as plain columns and lists.

Every row is complete, so that any tool can filter, shuffle and join rows. The columns of a record are its fields.
Values without a fixed shape (a run's configuration, a task's payload, a call's arguments) are JSON texts.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from itertools import count, islice
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainValidator,
    ValidationError,
    create_model,
)

from context.authors import USER, Author, AuthorTable
from context.messages import USUAL_AUTHORS, Message, ToolCall, canonical_json, to_template
from context.tokens.session_nodes import Fork, Node, Place, Status, checked_nodes
from context.tokens.session_segments import segments_of
from context.tokens.token_sequence import TOKEN_FIELDS, Segment, TokenSequence
from context.wording import nearest
from replay.errors import first_problem, shortened
from replay.exchange.json_text import BadRow, read_json, read_object
from replay.records import GroupRecord, Label, PolicyRecord, RunRecord, TaskRecord, Trajectory, TrajectoryRecord
from replay.storage.format.column_types import column_types
from replay.storage.format.encoding import TOKEN_BYTES
from replay.storage.format.rows import LOG_PROB_FIELDS

FORMAT = 8
"""Raised when a column changes its meaning, or one is added or goes."""
_EARLIER = 7
"""The earlier format that is still read."""

PlainRow = dict[str, Any]
_Part = TypeVar("_Part", bound="Part")


Tools = Sequence[Mapping[str, Any]]
"""The schemas of tools."""


@dataclass(frozen=True)
class Bundle:
    """A trajectory and the records that it refers to."""

    trajectory: Trajectory
    group: GroupRecord
    task: TaskRecord
    run: RunRecord
    policies: tuple[PolicyRecord, ...]
    """The known policies that sampled the trajectory, or that its versions name, and the newest of the run."""
    labels: tuple[Label, ...] = ()
    run_labels: tuple[Label, ...] = ()
    created_at: str | None = None
    """When the row was stored; None: that is not known."""
    tools: Tools | None = None
    """What the policy was offered; None: that is not known."""

    def with_record(self, **changes: Any) -> Bundle:
        record = replace(self.trajectory.record, **changes)
        return replace(self, trajectory=replace(self.trajectory, record=record))

    @property
    def size(self) -> int:
        """The approximate bytes of its tokens and messages."""
        row = self.trajectory
        said = sum(len(one.content) + len(one.reasoning or "") + len(str(one.tool_calls)) for one in row.messages)
        return said + TOKEN_BYTES * sum(len(part.tokens) for part in row.segments)


def _numbers(dtype: type[np.generic], value: object) -> npt.NDArray[Any]:
    """A list of numbers as an array; null stands for an unknown number."""
    if isinstance(value, np.ndarray):
        return value
    is_real = dtype is np.float32
    if not isinstance(value, list) or not set(map(type, value)) <= ({int, float, type(None)} if is_real else {int}):
        raise ValueError(f"should be a list of {dtype.__name__}")
    try:
        with np.errstate(over="ignore"):
            return np.array(value, np.float64).astype(np.float32) if is_real else np.array(value, dtype)
    except OverflowError:
        raise ValueError(f"should hold numbers of {dtype.__name__}, none beyond them") from None


class Part(BaseModel):
    """A row, or an object in a row. Every column is required."""

    model_config = ConfigDict(strict=True, extra="forbid")


def typed(kind: type[_Part], value: object, *, whole: str = "row") -> _Part:
    """The value as an instance of `kind`. Raises BadRow; `whole` is the name of the value in its message."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        place, rule, shown = first_problem(error)
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place[:8]).removeprefix(".")
        near = (
            nearest(shown.strip("'"), list(kind.model_fields)) if rule == "hold known columns" and not place else None
        )
        advice = f" Did you mean {near!r}?" if near else ""
        raise BadRow(f"{where or whole} must {rule}, got {shown}.{advice}") from None


Payload = Annotated[dict[str, JsonValue], BeforeValidator(partial(read_object, constants=False))]
Arguments = Annotated[dict[str, JsonValue], BeforeValidator(read_object)]
"""A model may write NaN in them."""


def _tools(text: str) -> str:
    if text and not isinstance(read_object(text), list):
        raise ValueError("should be JSON of a list")
    return text


def _time(text: str) -> str:
    if (given := datetime.fromisoformat(text)).tzinfo is None:
        raise ValueError("should have a time zone")
    try:
        return given.astimezone(UTC).isoformat()
    except OverflowError:
        raise ValueError("should be of the years 1 to 9999") from None


Time = Annotated[str, AfterValidator(_time)]
"""ISO 8601; Parquet has a type for it."""


def _read_arguments(given: object) -> Any:
    return read_object(given) if isinstance(given, str) else given


class ChatFunction(Part):
    name: str
    arguments: Annotated[dict[str, JsonValue], BeforeValidator(_read_arguments)]
    """A text of JSON where the model wrote a number that not every reader knows."""


class ChatCall(Part):
    type: Literal["function"]
    id: str | None = None
    function: ChatFunction


class ChatMessage(Part):
    """A message in the chat format. A field without a value is left out."""

    role: str
    content: str
    """With `note` below."""
    reasoning_content: str | None = None
    tool_calls: list[ChatCall] = []
    name: str | None = None
    tool_call_id: str | None = None
    author: str | None = None
    """None: the role's usual one."""
    note: str = ""
    error_kind: str | None = None
    reward: float | None = None


def _part(kind: str, columns: Mapping[str, Any]) -> Any:
    required: dict[str, Any] = {name: (column, ...) for name, column in columns.items()}
    return create_model(kind, __base__=Part, **required)


def _list(part: Any) -> Any:
    """The type of a list of parts. The check stops at the first bad part, for a list may hold a million."""
    return Annotated[list[part], Field(fail_fast=True)]


_SHARED_FIELDS = ("id", "run", "task", "iteration")
"""Fields of a group that follow from its members."""
_POLICY = ("version", "tokenizer_hash", "template_hash")
_RECORD: dict[str, Any] = column_types(TrajectoryRecord) | dict.fromkeys(LOG_PROB_FIELDS, float | None)
_GROUP = {f"group_{name}": kind for name, kind in column_types(GroupRecord).items() if name not in _SHARED_FIELDS}
_TASK = {"task_environment": str, "task_payload": Payload, "task_tools": Annotated[str, AfterValidator(_tools)] | None}
_RUN = {f"run_{name}": kind for name, kind in column_types(RunRecord).items() if name != "id"}
_RUN |= {"run_config": Arguments, "run_fingerprint": Payload | None}
_MESSAGE = column_types(Message)
_LABELS = _list(_part("LabelColumns", column_types(Label)))
_CALL = _part("CallColumns", column_types(ToolCall) | {"arguments": Arguments})
_ARRAYS = {name: Annotated[Any, PlainValidator(partial(_numbers, dtype))] for name, dtype in TOKEN_FIELDS.items()}
_NODE = {"number": int, **column_types(Place), "fork": Literal[*map(str, Fork)] | None}
_NODE |= {"status": Literal[*map(str, Status)], "agent": str, "offered": Annotated[str, AfterValidator(_tools)]}
_NODE |= {"num_messages": int, "num_sampled": int}
_PARTS = {
    "policies": _list(_part("PolicyColumns", {name: column_types(PolicyRecord)[name] for name in _POLICY})),
    "labels": _LABELS,
    "run_labels": _LABELS,
    "segments": _list(_part("SegmentColumns", {"reason": str, "behavior_context": str} | _ARRAYS)),
    "nodes": _list(_part("NodeColumns", _NODE | _ARRAYS)),
    "messages": _list(_part("MessageColumns", _MESSAGE | {"tool_calls": _list(_CALL)})),
}
_COLUMNS = _RECORD | _GROUP | _TASK | _RUN | {"messages_hash": str} | _PARTS
EarlierRow = _part("EarlierRow", {"format": Literal[_EARLIER]} | _COLUMNS)
_LABELS = _list(_part("TimedLabelColumns", column_types(Label) | {"created_at": Time | None}))
_COLUMNS |= {"labels": _LABELS, "run_labels": _LABELS, "created_at": Time | None, "error_kinds": list[str] | None}
_COLUMNS |= {"tools": _list(dict[str, JsonValue]) | None, "messages": _list(ChatMessage)}
_NAMES = {
    "labels": "trajectory_labels",
    "group": "group_id",
    "group_reward_mean": "group_reward",
    "group_success_rate": "group_success",
}
"""Columns that are called as in frames; trainers mean labels of tokens by `labels`."""
_FIELDS = {column: name for name, column in _NAMES.items()}
_RENAMED = {_NAMES.get(name, name): kind for name, kind in _COLUMNS.items()}
ExchangedRow = _part("ExchangedRow", {"format": Literal[FORMAT]} | _RENAMED)
_AuthorColumns = _part("AuthorColumns", column_types(Author))


def to_plain(bundle: Bundle) -> PlainRow:
    """The columns of a row in order. Arrays of tokens stay arrays, with NaN for unknown values."""
    record, group, run = bundle.trajectory.record, bundle.group, bundle.run
    row: PlainRow = {"format": FORMAT} | {name: getattr(record, name) for name in _RECORD}
    row |= {name: None for name in LOG_PROB_FIELDS if math.isnan(row[name])}
    row["error_kinds"] = record.error_kinds and record.error_kinds.split(" ")
    row |= {name: getattr(group, name.removeprefix("group_")) for name in _GROUP}
    row |= {"task_environment": bundle.task.environment, "task_payload": canonical_json(bundle.task.payload)}
    row["task_tools"] = bundle.task.tools
    row |= {name: getattr(run, name.removeprefix("run_")) for name in _RUN} | {
        "run_config": json.dumps(dict(run.config)),
        "run_fingerprint": None if run.fingerprint is None else canonical_json(run.fingerprint),
    }
    messages = [_chat_message(message) for message in bundle.trajectory.messages]
    row["messages_hash"] = _messages_hash(messages)
    row["policies"] = [{name: getattr(policy, name) for name in _POLICY} for policy in bundle.policies]
    row |= {name: [*map(vars, getattr(bundle, name))] for name in ("labels", "run_labels")}
    row["segments"] = [
        {"reason": part.reason, "behavior_context": part.behavior_context}
        | {name: getattr(part.tokens, name) for name in TOKEN_FIELDS}
        for part in ([] if bundle.trajectory.nodes else bundle.trajectory.segments)
    ]
    row["nodes"] = [
        {"number": node.number, **vars(node.place), "status": node.status, "agent": node.agent, "offered": node.offered}
        | {"num_messages": len(node.messages), "num_sampled": node.num_sampled}
        | {name: getattr(node.tokens, name) for name in TOKEN_FIELDS}
        for node in bundle.trajectory.nodes
    ]
    row |= {"created_at": bundle.created_at, "tools": bundle.tools, "messages": messages}
    return {_NAMES.get(name, name): value for name, value in row.items()}


def _messages_hash(messages: Sequence[object]) -> str:
    """sha256 of the messages as JSON with sorted keys. It shows whether somebody changed the messages of a row."""
    return hashlib.sha256(json.dumps(messages, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _chat_message(message: Message) -> PlainRow:
    row = to_template(message)
    for call in row.get("tool_calls", ()):
        if not _is_common(arguments := call["function"]["arguments"]):
            call["function"]["arguments"] = json.dumps(arguments)
    usual = message.author == USUAL_AUTHORS.get(message.role, USER)
    facts: PlainRow = {"author": None if usual else message.author, "note": message.note or None}
    facts |= {"error_kind": message.error_kind, "reward": message.reward}
    return row | {name: value for name, value in facts.items() if value is not None}


def _is_common(value: object) -> bool:
    """Whether every reader of JSON knows the numbers in it."""
    if isinstance(value, dict | list):
        return all(map(_is_common, value.values() if isinstance(value, dict) else value))
    return math.isfinite(value) if isinstance(value, float) else not isinstance(value, int) or abs(value) < 2**63


def from_plain(row: PlainRow) -> Bundle:
    """The bundle of a row that anybody may have written. Raises BadRow; the store checks the records themselves."""
    is_earlier = isinstance(row, dict) and row.get("format") == _EARLIER
    given = typed(EarlierRow if is_earlier else ExchangedRow, row)
    if given.messages_hash not in ("", digest := _messages_hash(row["messages"])):
        raise BadRow(
            f"messages_hash must be that of the messages ({digest}), got {shortened(given.messages_hash)}. "
            "The messages were changed after the export. To import them as they are, empty messages_hash."
        )
    columns = {_FIELDS.get(name, name): value for name, value in vars(given).items()}
    values = {name: columns[name] for name in _RECORD}
    if not is_earlier and values["error_kinds"] is not None:
        values["error_kinds"] = " ".join(values["error_kinds"]) or None
    record = TrajectoryRecord(**values | {name: math.nan for name in LOG_PROB_FIELDS if values[name] is None})
    ours = {name: getattr(record, name) for name in _SHARED_FIELDS} | {"id": record.group}
    group = GroupRecord(**ours, **{name.removeprefix("group_"): columns[name] for name in _GROUP})
    if hashlib.sha256(given.run_authors.encode("utf-8", "surrogatepass")).hexdigest() != given.run_authors_hash:
        raise BadRow(f"run_authors_hash must be that of run_authors, got {shortened(given.run_authors_hash)}.")
    author_table(given.run_authors)
    run = RunRecord(id=record.run, **{name.removeprefix("run_"): columns[name] for name in _RUN})
    # A snapshot's path means nothing outside its own run's folder.
    policies = tuple(PolicyRecord(run=record.run, checkpoint=None, **vars(policy)) for policy in given.policies)
    segments, said = tuple(map(_segment, count(), given.segments)), tuple(map(_message, given.messages))
    trajectory = Trajectory(record, segments, said, _nodes(given.nodes, said))
    if trajectory.nodes:
        trajectory = replace(trajectory, segments=segments_of(trajectory.nodes, author_table(given.run_authors)))
    task = TaskRecord(record.task, given.task_environment, given.task_payload, given.task_tools)
    labels, of_run = (tuple(Label(**vars(one)) for one in columns[name]) for name in ("labels", "run_labels"))
    stored = {"created_at": columns.get("created_at"), "tools": columns.get("tools")}
    return Bundle(trajectory, group, task, run, policies, labels, of_run, **stored)


@lru_cache(maxsize=8)
def author_table(text: str) -> AuthorTable:
    try:
        read_json(text)
        table = AuthorTable.from_json(text)
        for author in table.authors:
            typed(_AuthorColumns, vars(author), whole="author")
    except (TypeError, ValueError, AttributeError) as error:
        raise BadRow(f"run_authors must be an author table, got one that is not ({shortened(str(error))}).") from None
    return table


def _segment(position: int, part: Any) -> Segment:
    return Segment(_tokens(part, f"segments[{position}]"), part.reason, part.behavior_context)


def _nodes(parts: Sequence[Any], messages: Sequence[Message]) -> tuple[Node, ...]:
    """Make the nodes of a session. The messages are distributed over them in order, by each node's `num_messages`."""
    said = iter(messages)

    def node(part: Any) -> Node:
        fork = None if part.fork is None else Fork(part.fork)
        place = Place(part.parent, part.kept_tokens, part.kept_messages, part.tools, fork)
        tokens, own = _tokens(part, f"nodes[{part.number}]"), tuple(islice(said, max(0, part.num_messages)))
        return Node(part.number, place, tokens, part.num_sampled, own, Status(part.status), part.agent, part.offered)

    try:
        return checked_nodes(map(node, parts))
    except BadRow:
        raise
    except ValueError as error:
        raise BadRow(str(error)) from None


def _tokens(part: Any, where: str) -> TokenSequence:
    try:
        return TokenSequence(*(getattr(part, name) for name in TOKEN_FIELDS))
    except ValueError as error:
        raise BadRow(f"{where}.{error}") from None


def _message(part: Any) -> Message:
    if not isinstance(part, ChatMessage):
        return Message(**vars(part) | {"tool_calls": tuple(ToolCall(**vars(call)) for call in part.tool_calls)})
    values = vars(part) | {"reasoning": part.reasoning_content}
    values["author"] = USUAL_AUTHORS.get(part.role, USER) if part.author is None else part.author
    values["tool_calls"] = tuple(ToolCall(**vars(call.function), id=call.id) for call in part.tool_calls)
    if part.note:
        values["content"] = "" if part.content == part.note else part.content.removesuffix(f"\n\n{part.note}")
    return Message(**{field.name: values[field.name] for field in fields(Message)})
