"""A buffer as DataFrames, opened with `replay.open(RUN)`."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from decimal import Decimal
from inspect import signature
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import sqlalchemy as sa

from context.messages import Message
from context.wording import excerpt, suggest
from replay.errors import CorruptTrajectory, ReplayError, shortened
from replay.frames.arrow_rows import ArrowRows, arrow, schema_of, selected_batches, typed_array
from replay.frames.token_columns import TOKEN_COLUMNS, TokenReader, column_array, in_chunks, list_arrays, token_type
from replay.open_buffer import OpenBuffer, find_run, open_buffer
from replay.questions.filters import conditions
from replay.questions.filters.query import run_is, staleness
from replay.questions.tasks import task_questions
from replay.questions.tools import paired_calls
from replay.storage.format.column_types import to_storable
from replay.storage.format.encoding import BlobError
from replay.storage.format.rows import chunked, messages_of
from replay.storage.format.schema import groups, messages, trajectories
from replay.storage.format.views import TRAJECTORY_COLUMNS, VIEWS
from replay.storage.statements import rows_by_key, selected

if TYPE_CHECKING:
    import pyarrow

_rows = trajectories.c
_ORDER = (_rows.run, _rows.iteration, _rows.slot, _rows.id)
_GROUP = groups.alias("its_group")  # an alias, because filters use the table themselves
_OF_GROUP = {"group_size": _GROUP.c.size, "group_success": _GROUP.c.success_rate, "group_reward": _GROUP.c.reward_mean}
_MESSAGES = ("author", "role", "content", "reasoning", "tool_calls", "name", "tool_call_id", "error_kind", "note")
_READS = re.compile(r"\s*(select|with|values|explain)\b", re.IGNORECASE)
Where = str | Sequence[str] | None
"""A filter, or several that must all hold: docs/replay.md#filters."""
_RowsOf = Callable[[str, Sequence[Message], str | None], Iterator[dict[str, Any]]]
"""A function (id of a trajectory, its messages, its `error_kinds`) that yields rows."""


def open_run(run: str | os.PathLike[str] | None = None) -> Buffer:
    """Open the buffer of a run, its folder, a database file or a URL, also while the run goes on. Raises ReplayError.

    None: the newest run under ./runs.
    """
    return Buffer(open_buffer(None if run is None else os.fspath(run)))


class Buffer:
    """A buffer with lazy answers (`ArrowRows`), which `.to_pandas()`, `.to_polars()` or `.to_arrow()` reads.

    Trajectories, messages and tokens are those of the whole database, imported rows included; filters can compare `run`
    and `source`. Groups, draws, iterations, tasks and metrics are those of the run whose folder was opened.
    """

    def __init__(self, opening: AbstractContextManager[OpenBuffer]) -> None:
        self._opening = opening
        self._buffer = opening.__enter__()
        self._run = self._buffer.run

    def __repr__(self) -> str:
        return f"buffer of {self._buffer.store.url}: trajectories, messages, draws, groups, iterations, tasks, metrics"

    def close(self) -> None:
        self._opening.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def trajectories(self, where: Where = None, columns: Sequence[str] | None = None) -> ArrowRows:
        """Return one row per trajectory, ordered by run, iteration and slot.

        `columns` are columns of `v_trajectories`, which are the default, and columns of tokens (`token_id`, `author`,
        ...: see `tokens`). A column of tokens has a list per row; null: the row's tokens are gone. Raises ReplayError,
        and CorruptTrajectory for damaged rows.
        """
        known = [*TRAJECTORY_COLUMNS, *TOKEN_COLUMNS]
        names = list(TRAJECTORY_COLUMNS) if columns is None else list(columns)
        if not names or isinstance(columns, str):
            raise ReplayError(f'columns must be a list of at least one name, got {columns!r}. Write ["id"], say.')
        if unknown := [name for name in names if name not in known]:
            raise ReplayError(f"columns must name columns, got {unknown[0]!r}. {suggest(unknown[0], known)}")
        lists = [name for name in names if name in TOKEN_COLUMNS]
        plain = [name for name in names if name not in TOKEN_COLUMNS]
        pa = arrow()
        fields = {field.name: field for field in schema_of(_columns(plain))}
        fields |= {name: pa.field(name, pa.list_(token_type(name))) for name in lists}
        schema = pa.schema([fields[name] for name in names])

        def batches() -> Iterator[pyarrow.RecordBatch]:
            with self._buffer.store.reading() as connection:
                query, derived = self._chosen(connection, where)
                shown = _columns(plain, derived)
                if not lists:
                    yield from selected_batches(connection, shown, query)
                    return
                reader, at = TokenReader(connection), _rows.id.label("id")
                for batch in selected_batches(connection, [at, *(one for one in shown if one.name != "id")], query):
                    yield from _with_lists(batch, lists, schema, reader)

        return ArrowRows(schema, batches)

    def tokens(self, where: Where = None) -> ArrowRows:
        """Return one row per token. Trajectories whose tokens are gone are left out. Raises CorruptTrajectory."""
        pa = arrow()
        schema = pa.schema([("trajectory", pa.string()), *((name, token_type(name)) for name in TOKEN_COLUMNS)])

        def batches() -> Iterator[pyarrow.RecordBatch]:
            with self._buffer.store.reading() as connection:
                for ids, rows in in_chunks(self._ids(connection, where), TokenReader(connection)):
                    for id, row in zip(ids, rows, strict=True):
                        if row is not None:
                            columns = [column_array(name, row[name]) for name in TOKEN_COLUMNS]
                            named = pa.repeat(id, len(columns[0]))
                            yield pa.RecordBatch.from_arrays([named, *columns], schema=schema)

        return ArrowRows(schema, batches)

    def messages(self, where: Where = None) -> ArrowRows:
        """Return one row per message. `tool_calls` is JSON. Raises CorruptTrajectory for damaged messages."""
        pa = arrow()
        schema = pa.schema(
            [("trajectory", pa.string()), ("position", pa.int64()), *((name, pa.string()) for name in _MESSAGES)]
        )

        return self._from_conversations(where, schema, _messages)

    def tool_calls(self, where: Where = None) -> ArrowRows:
        """Return one row per tool call, with its answer. `arguments` is JSON, and null is an answer that is not stored.

        A call that could not be read has no name and no arguments. Raises CorruptTrajectory for damaged messages.
        """
        pa = arrow()
        places, texts = ("position", "number"), ("name", "arguments", "answer", "error_kind")
        kinds = dict.fromkeys(("trajectory", *texts), pa.string()) | dict.fromkeys(places, pa.int64())
        schema = pa.schema([(name, kinds[name]) for name in ("trajectory", *places, *texts)])
        return self._from_conversations(where, schema, _calls)

    def draws(self) -> ArrowRows:
        """Return one row per use of a trajectory by an update: `v_draws`."""
        return self._view("v_draws", "run", "iteration", "slot")

    def groups(self) -> ArrowRows:
        """Return one row per group of attempts at a task: `v_groups`."""
        return self._view("v_groups", "run", "iteration", "id")

    def iterations(self) -> ArrowRows:
        """Return one row per iteration: `v_iterations`."""
        return self._view("v_iterations", "run", "iteration")

    def tasks(self) -> ArrowRows:
        """Return one row per task, with first, latest and best success: `v_tasks`, and the task's `question`.

        The question is the last message of the user before the first reply; null: no attempt's messages are stored.
        """
        rows, pa = self._view("v_tasks", "run", "task"), arrow()

        def batches() -> Iterator[pyarrow.RecordBatch]:
            for batch in rows:
                with self._buffer.store.reading() as connection:
                    found = task_questions(connection, batch.column("task").to_pylist())
                yield batch.append_column("question", pa.array(map(to_storable, found), pa.string()))

        return ArrowRows(rows.schema.append(pa.field("question", pa.string())), batches)

    def runs(self) -> ArrowRows:
        """Return one row per run: `v_runs`."""
        return self._view("v_runs", "run")

    def labels(self) -> ArrowRows:
        """Return one row per label of a trajectory or of a run: `v_labels`."""
        return self._view("v_labels", "run", "trajectory", "label")

    def held_out(self) -> ArrowRows:
        """Return one row per stored episode of an evaluation: `v_held_out`."""
        return self._view("v_held_out", "run", "iteration", "number")

    def metrics(self) -> ArrowRows:
        """Return one row per metric and iteration: `v_metrics`."""
        return self._view("v_metrics", "run", "iteration", "name")

    def ask(self, question: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        """Call a function of `replay.questions` with this buffer's store and run, and return its answer.

        A question about one run is asked about the only run with an iteration if none was named. Raises ReplayError.
        """
        takes_all = signature(question).parameters["run"].default is None
        run = self._buffer.own_run if takes_all else find_run(self._buffer, None)
        return question(self._buffer.store, run, *arguments, **more)

    def sql(self, query: str, **parameters: Any) -> ArrowRows:
        """Run one query and return all its rows. docs/schema.md has the views. Raises ReplayError.

        `parameters` are the values of `:names` in the query. A column that is named as one of a view has its type, if
        all values fit.
        """
        if not _READS.match(query):
            raise ReplayError(f"query must begin with select, with, values or explain, got {excerpt(query, 60)!r}.")
        if ";" in query.rstrip().rstrip(";"):
            raise ReplayError(f"query must be one statement, without a ; in it, got {excerpt(query, 60)!r}.")
        with self._buffer.store.reading() as connection:
            try:
                if parameters:
                    found = connection.execute(sa.text(query), parameters)
                else:
                    found = connection.execution_options(no_parameters=True).exec_driver_sql(query)
                names, rows = list(found.keys()), found.fetchall()
            except sa.exc.SQLAlchemyError as error:
                reason = shortened(str(getattr(error, "orig", error)))
                raise ReplayError(f"query must be SQL that reads, got one that fails: {reason}.") from error
        pa = arrow()
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(names)
        try:  # PostgreSQL gives decimals for sums and means
            arrays = [_column_array(name, column) for name, column in zip(names, columns, strict=True)]
        except pa.ArrowException as error:
            raise ReplayError(
                f"query must give values of one type in each column, got {shortened(str(error))}."
            ) from None
        batch = pa.RecordBatch.from_arrays(arrays, names=names)
        return ArrowRows(batch.schema, lambda: iter([batch]))

    def label(self, ids: Sequence[str], label: str, note: str | None = None, *, by: str | None = None) -> int:
        """Label all of these trajectories, or none. Returns their number. See `ReplayStore.labels`."""
        with self._buffer.writing() as store:
            return store.labels.add(ids, label, note, by=by)

    def _view(self, name: str, *order: str) -> ArrowRows:
        query = VIEWS[name]
        columns = [column.label(name) for name, column in query.selected_columns.items()]
        of = {column.name: column for column in columns}
        run = self._buffer.own_run
        mine = sa.true() if run is None else of["run"].element == run
        query = query.where(mine).order_by(*(of[name].element for name in order))

        def batches() -> Iterator[pyarrow.RecordBatch]:
            with self._buffer.store.reading() as connection:
                yield from selected_batches(connection, columns, query)

        return ArrowRows(schema_of(columns), batches)

    def _from_conversations(self, where: Where, schema: pyarrow.Schema, rows_of: _RowsOf) -> ArrowRows:
        def batches() -> Iterator[pyarrow.RecordBatch]:
            with self._buffer.store.reading() as connection:
                for ids in chunked(self._ids(connection, where)):
                    failed = dict(map(tuple, selected(connection, (_rows.id, _rows.error_kinds), _rows.id, ids)))
                    talks = _conversations(connection, ids)
                    rows = [row for id, said in talks for row in rows_of(id, said, failed[id])]
                    yield arrow().RecordBatch.from_pylist(rows, schema)

        return ArrowRows(schema, batches)

    def _chosen(self, connection: sa.Connection, where: Where) -> tuple[sa.Select[Any], dict[str, Any]]:
        """Return a query for the trajectories that fit, in order, and faster expressions for some columns."""
        age = staleness(connection, self._run)
        texts = [where] if isinstance(where, str) else list(where or ())
        parts = conditions(texts, known={"staleness": age})
        fits = [run_is(self._run, _rows.run), parts.columns, *([] if parts.messages is None else [parts.messages])]
        joined = trajectories.outerjoin(_GROUP, _GROUP.c.id == _rows.group)
        return sa.select(trajectories).select_from(joined).where(*fits).order_by(*_ORDER), {
            "staleness": age,
            **_OF_GROUP,
        }

    def _ids(self, connection: sa.Connection, where: Where) -> list[str]:
        query, _ = self._chosen(connection, where)
        return list(connection.scalars(query.with_only_columns(_rows.id)))


def _columns(names: Sequence[str], instead: dict[str, Any] | None = None) -> list[sa.Label[Any]]:
    known = {**TRAJECTORY_COLUMNS, **(instead or {})}
    return [known[name].label(name) for name in names]


def _with_lists(
    batch: pyarrow.RecordBatch, lists: Sequence[str], schema: pyarrow.Schema, reader: TokenReader
) -> Iterator[pyarrow.RecordBatch]:
    pa, start = arrow(), 0
    for chunk, found in in_chunks(batch.column("id").to_pylist(), reader):
        part, start = batch.slice(start, len(chunk)), start + len(chunk)
        columns = dict(zip(part.schema.names, part.columns, strict=True)) | list_arrays(found, lists)
        yield pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def _column_array(name: str, values: Sequence[Any]) -> Any:
    """Make a column of a query's answer. It has the type of the views' column of its name, or that of its values."""
    known = {column.name: column for query in VIEWS.values() for column in query.selected_columns}
    plain = [float(value) if isinstance(value, Decimal) else value for value in values]
    if name in known:
        with suppress(arrow().ArrowException, LookupError, AttributeError):
            return typed_array(plain, schema_of([known[name]]).types[0])
    return arrow().array(plain)


def _calls(id: str, said: Sequence[Message], error_kinds: str | None) -> Iterator[dict[str, Any]]:
    numbers = Counter[int]()
    for position, call, answer, error_kind in paired_calls(said, error_kinds):
        texts = {"answer": None if answer is None else answer.content, "error_kind": error_kind}
        texts |= {} if call is None else {"name": call.name, "arguments": json.dumps(dict(call.arguments))}
        place = {"trajectory": id, "position": position, "number": numbers[position]}
        yield place | {name: to_storable(text) for name, text in texts.items()}
        numbers[position] += 1


def _messages(id: str, said: Sequence[Message], _: str | None) -> Iterator[dict[str, Any]]:
    for position, message in enumerate(said):
        calls = [{"name": call.name, "arguments": dict(call.arguments), "id": call.id} for call in message.tool_calls]
        texts = {**vars(message), "tool_calls": json.dumps(calls) if calls else None}
        place = {"trajectory": id, "position": position}
        yield place | {name: to_storable(texts[name]) for name in _MESSAGES}


def _conversations(connection: sa.Connection, ids: Sequence[str]) -> Iterator[tuple[str, Sequence[Message]]]:
    stored = rows_by_key(connection, tuple(messages.c), ids, key=messages.c.trajectory)
    found = {id: conversation for id, *conversation in stored}
    for id in ids:
        try:
            said = messages_of(*found[id]) if id in found else ()
        except BlobError as error:
            raise CorruptTrajectory(id, str(error)) from error
        yield id, said
