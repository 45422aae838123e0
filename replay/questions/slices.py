"""Success by kind of task: the values of a field over iterations, or over evaluations of held-out tasks."""

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from context.wording import suggest
from replay.errors import ReplayError
from replay.questions.filters.payload_fields import is_payload_name, payload_name
from replay.questions.filters.query import QueryResult, run_is
from replay.questions.summary import bars_of, total
from replay.questions.tasks import short_values
from replay.questions.trajectory import shorten_conversations
from replay.records import REMOVED_TASK
from replay.sampling.samplers import successes
from replay.storage.collecting.never_drawn import SAID
from replay.storage.format import schema
from replay.storage.format.rows import readable_messages
from replay.storage.format.schema import groups, tasks
from replay.storage.format.views import COUNTS_AS_ATTEMPTS, IS_EPISODE
from replay.storage.statements import selected
from replay.store import ReplayStore

_rows, _episodes = schema.trajectories.c, schema.held_out.c
_MOST_VALUES = 24
_COLUMNS = 8
_Tried = Sequence[tuple[Any, ...]]
"""(key, iteration, episodes, successes); the key is a task, or the stop reason of the episodes."""


@dataclass(frozen=True)
class _Field:
    name: str
    tried: _Tried
    place: Mapping[str, int]
    """The row of the heat map by key. Keys whose value is not known are not in it."""
    rows: Sequence[tuple[str, str]]
    """The value of each row of the heat map, and the filter for its trajectories."""
    is_of_task: bool = True

    def grid(self, starts: Sequence[int]) -> npt.NDArray[np.int64]:
        """Count episodes, successes and groups [rows, columns, 3]. `starts` are the columns' first iterations."""
        tried = np.array([(self.place[key], *counts, 1) for key, *counts in self.tried if key in self.place])
        grid = np.zeros((len(self.rows), len(starts), 3), np.int64)
        np.add.at(grid, (tried[:, 0], np.searchsorted(starts, tried[:, 1], side="right") - 1), tried[:, 2:])
        return grid

    def spread(self) -> float:
        """Return the variance of success between the rows, weighted by their episodes."""
        episodes, successes, _ = self.grid([0])[:, 0].T
        rates = successes / np.maximum(episodes, 1)
        return float(np.average((rates - successes.sum() / episodes.sum()) ** 2, weights=episodes))


def slices(store: ReplayStore, run: str | None = None, by: str | None = None, *, held_out: bool = False) -> QueryResult:
    """Return the success of a run (None: of all) by the values of a field, in columns of merged iterations.

    `fields` names those that tell episodes apart: fields of the tasks' payloads (`info.level` is within an object) and
    the environment, then the stop reason, each time the one whose values differ most in success first. `by` is one of
    them; None: the first. Attempts are counted as in `questions.task`; those by stop reason are of stored rows.
    `groups` counts how often a row's tasks were tried: an interval should take these as trials, because the attempts of
    a group are alike. `of_tasks` says that `by` is no stop reason. `unknown` counts the episodes without a value.
    `held_out` asks about the kept evaluations, each in its own column.
    """
    with store.reading() as connection:
        fields = {field.name: field for field in _fields(connection, run, held_out)}
    answer: QueryResult = {"run": run, "held_out": held_out, "fields": list(fields), "by": by}
    if by is None and not fields:
        return {**answer, "columns": [], "rows": [], "unknown": 0}
    field = _named(fields, by)
    iterations = sorted({iteration for _, iteration, *_ in field.tried})
    columns = _columns(iterations, len(iterations) if held_out else _COLUMNS)
    grid = field.grid([first for first, _ in columns])
    rows = [
        {"value": value, "filter": filter, **_counted_in(of_row.sum(0)), "cells": [*map(_counted_in, of_row)]}
        for (value, filter), of_row in zip(field.rows, grid, strict=True)
        if of_row.any()
    ]
    unknown = sum(count for key, _, count, _ in field.tried if key not in field.place)
    answer |= {"by": field.name, "of_tasks": field.is_of_task}
    return {**answer, "columns": columns, "rows": rows, "unknown": unknown}


def _counted_in(cell: npt.NDArray[np.int64]) -> QueryResult:
    return dict(zip(("episodes", "successes", "groups"), cell.tolist(), strict=True))


def held_out_row(store: ReplayStore, run: str, by: str, value: str) -> sa.ColumnElement[bool]:
    """Return the condition for the held-out episodes of one row of `slices`."""
    with store.reading() as connection:
        field = _named({field.name: field for field in _fields(connection, run, held_out=True)}, by)
    keys = [key for key, at in field.place.items() if field.rows[at][0] == value]
    return (_episodes.task if field.is_of_task else _episodes.stop_reason).in_(keys)


def unsolved_held_out(store: ReplayStore, run: str, *, limit: int = 100) -> QueryResult:
    """List held-out tasks that the latest kept evaluation did not solve: those `lost` after a success, then the others.

    `lost` and `never_solved` count them among all `tasks`. `course` has [iteration, success rate] of each evaluation.
    """
    courses: dict[str, list[list[float]]] = {}
    with store.reading() as connection:
        for task, iteration, count, solved in sorted(_counted(connection, run, _episodes, "task")):
            courses.setdefault(task, []).append([iteration, solved / count])
        latest = max((course[-1][0] for course in courses.values()), default=0)
        unsolved = {task: any(rate for _, rate in course) for task, course in courses.items() if not course[-1][1]}
        shown = sorted(unsolved, key=lambda task: not unsolved[task])[:limit]
        query = sa.select(_episodes.task, *(_episodes[name] for name in SAID))
        query = query.where(_episodes.run == run, _episodes.iteration == latest, _episodes.task.in_(shown))
        said = {task: readable_messages(*columns) for task, *columns in connection.execute(query)}
        said = {task: said.get(task) for task in shown}
        payloads = {row.hash: row.payload for row in selected(connection, [*tasks.c], tasks.c.hash, shown)}
    rows = [
        {
            "task": task,
            "facts": short_values(payloads.get(task, REMOVED_TASK)),
            "prompt": short["prompt"],
            "lost": unsolved[task],
            "course": courses[task],
        }
        for task, short in zip(said, shorten_conversations([*said.values()]), strict=True)
    ]
    lost = sum(unsolved.values())
    return {"tasks": len(courses), "lost": lost, "never_solved": len(unsolved) - lost, "rows": rows}


def _named(fields: Mapping[str, _Field], by: str | None) -> _Field:
    name = next(iter(fields), "") if by is None else by
    if name not in fields:
        raise ReplayError(f"by must name a field that tells episodes apart, got {name!r}. {suggest(name, fields)}")
    return fields[name]


def _columns(iterations: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Return the first and the last iteration of each column."""
    size = -(-len(iterations) // most)
    return [(iterations[at], iterations[at : at + size][-1]) for at in range(0, len(iterations), size)]


def _fields(connection: sa.Connection, run: str | None, held_out: bool) -> list[_Field]:
    if held_out:
        tried, ended = (_counted(connection, run, _episodes, key) for key in ("task", "stop_reason"))
    else:
        columns = (groups.c.task, groups.c.iteration, groups.c.size, groups.c.success_rate)
        query = sa.select(*columns).where(COUNTS_AS_ATTEMPTS, run_is(run, groups.c.run))
        found = [*zip(*connection.execute(query), strict=True)] or [()] * 4
        solved = successes(np.array(found.pop()), np.array(found[2])).astype(int).tolist()
        tried = [*zip(*found, solved, strict=True)]
        ended = _counted(connection, run, _rows, "stop_reason", IS_EPISODE)
    values = _values_of_tasks(connection, {key for key, *_ in tried})
    fields = [_field(*name, of_task, tried) for name, of_task in values.items()]
    reasons = {key: key for key, *_ in ended}
    fields.append(_field("stop_reason", "stop_reason", reasons, ended, is_of_task=False))
    return sorted(filter(None, fields), key=lambda field: (not field.is_of_task, -field.spread(), field.name))


def _counted(connection: sa.Connection, run: str | None, of: Any, key: str, *counts: sa.ColumnElement[bool]) -> _Tried:
    """Count the episodes and successes of a table's rows by a column and iteration."""
    by = (of[key], of.iteration)
    query = sa.select(*by, sa.func.count(), total(sa.cast(of.success, sa.Integer))).where(run_is(run, of.run), *counts)
    return [tuple(row) for row in connection.execute(query.group_by(*by))]


def _values_of_tasks(connection: sa.Connection, hashes: set[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the values by task of each field that half of its environments' tasks have, by name and filter."""
    found: dict[tuple[str, ...], dict[str, Any]] = defaultdict(dict)
    environments: dict[str, str] = {}
    for row in selected(connection, [*tasks.c], tasks.c.hash, sorted(hashes)):
        environments[row.hash] = row.environment
        for path, value in _payload_fields({} if row.payload == REMOVED_TASK else json.loads(row.payload)):
            found[path][row.hash] = value
    sizes = Counter(environments.values())
    return {("environment", "environment"): environments} | {
        (".".join(path), payload_name(path)): values
        for path, values in found.items()
        if 2 * len(values) >= sum(sizes[each] for each in {environments[hash] for hash in values})
        and all(map(is_payload_name, path))
    }


def _payload_fields(payload: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield numbers, texts and truth values of a payload, and of the objects in it, with their paths."""
    for name, value in payload.items():
        if isinstance(value, dict) and not path:
            yield from _payload_fields(value, (name,))
        elif isinstance(value, (str, int, float)):
            yield (*path, name), value


def _field(name: str, text: str, values: Mapping[str, Any], tried: _Tried, *, is_of_task: bool = True) -> _Field | None:
    """Make a field's rows. None: its values do not tell episodes apart, as every task has its own, or all have one."""
    different = set(values.values())
    if all(type(value) in (int, float) and abs(value) < 1e300 for value in different):
        is_whole = all(type(value) is int for value in different)
        bars = bars_of(text, sorted(map(float, different)), whole=is_whole)
        lows = [bar["low"] for bar in bars[1:]]
        rows = [(_range(bar, is_whole), bar["filter"]) for bar in bars]
        place = {key: bisect_right(lows, value) for key, value in values.items()}
    elif len(different) <= _MOST_VALUES and all(len(str(value)) <= 100 for value in different):
        order = sorted(different, key=str)
        rows = [(value if isinstance(value, str) else json.dumps(value), f"{text} == {value!r}") for value in order]
        place = {key: order.index(value) for key, value in values.items()}
    else:
        return None
    used = len(set(place.values()))
    has_kinds = used > 1 and (2 * used <= len(values) or not is_of_task)
    return _Field(name, tried, place, rows, is_of_task) if has_kinds else None


def _range(bar: Mapping[str, Any], is_whole: bool) -> str:
    low, high = bar["low"], bar["high"]
    return f"{low}" if low == high else f"{low}\u2013{high - is_whole}"
