"""Writes docs/schema.md: `python -m docs.schema > docs/schema.md`.

What a column means is said where its owner is: at the
field of its record, at the field of a filter, or at the column itself (`doc`); what a view alone has, here.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise

import sqlalchemy as sa

from replay import records
from replay.frames.token_columns import TOKEN_COLUMNS
from replay.questions.filters import FIELDS
from replay.storage.collecting import ticket_records
from replay.storage.format.schema import metadata
from replay.storage.format.views import VIEWS

RECORDS: dict[str, type] = {
    "runs": records.RunRecord,
    "policies": records.PolicyRecord,
    "tasks": records.TaskRecord,
    "observations": records.ObservationRecord,
    "held_out": records.HeldOutEpisode,
    "groups": records.GroupRecord,
    "trajectories": records.TrajectoryRecord,
    "draws": records.DrawRecord,
    "iterations": records.IterationRecord,
    "tickets": ticket_records.TicketRecord,
    "planned_batches": ticket_records.PlannedBatch,
}
_OF_THE_ROW = {name: f"{name.capitalize()} of the trajectory." for name in ("source", "reward", "success", "task")}
OF_VIEWS: dict[str, dict[str, str]] = {
    "v_draws": {**_OF_THE_ROW, "group_id": "Group of the trajectory.", "trajectory": "Its id; the row may be gone."},
    "v_groups": {"without_signal": "Whether all rewards are equal, so that there is nothing to compare."},
    "v_tasks": {
        "task": "Hash of the task.",
        "environment": "Name of its environment.",
        "payload": "JSON of what the environment makes the task from.",
        "num_groups": "Groups of its episodes; not hindsight, and not those of iterations that a resume undid.",
        "attempts": "Episodes of these groups.",
        "success_rate": "Share of successful attempts.",
        "reward_mean": "Mean reward of the attempts.",
        "first_iteration": "Iteration of the first group.",
        "latest_iteration": "Iteration of the latest group.",
        "first_success": "Share of successful members of the first group.",
        "latest_success": "Share of successful members of the latest group.",
        "best_success": "Greatest share of successful members of a group.",
    },
    "v_labels": {
        "run": "Run of the trajectory, or the labelled run.",
        "trajectory": "Its id; null where a run is labelled.",
        "label": "A word.",
        "note": "What a person wrote about it.",
        "made_by": "Who made the label.",
        "created_at": "When.",
    },
}
"""What columns mean that views alone have."""
INTRODUCTION = """\
# Tables and views

<!-- Written by `python -m docs.schema`: change the code that it reads, not this page. -->

A buffer is one SQLite file, `replay.sqlite` in a run's folder, or a database of a PostgreSQL server, with the same
tables on both. Any program may read it while a run goes on; only `agentloop` may write it. Log-probs and entropies are
in nats; times that are texts are ISO 8601 in UTC; what is called None or NaN is null.

Blobs are compressed arrays or messages with a checksum, which no database unpacks:
[`replay.open(RUN).tokens()` and `.messages()`](dataframes.md) give them as rows.
"""
ABOUT_VIEWS = """\
## Views

Their columns have the names that [filters](replay.md#filters) use."""


def field_meanings(record: type) -> dict[str, str]:
    """The docstrings of a dataclass's fields, each in one line. One below several fields is of the last."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(record))).body
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(body.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def meanings(table: sa.Table) -> dict[str, str]:
    """What is said of its columns, by their names in SQL."""
    of_record = field_meanings(RECORDS[table.name]) if table.name in RECORDS else {}
    of_filter = {id(field.expression): _sentence(field.meaning) for field in FIELDS.values()}
    said: dict[str, str] = {}
    for column in table.columns:
        (target,) = [f"`{key.target_fullname}`" for key in column.foreign_keys] or [""]
        found = of_record.get(column.key) or column.doc or of_filter.get(id(column))
        said[column.name] = " ".join(filter(None, [found, target and f"One of {target}."]))
    return said


def table_section(table: sa.Table) -> Iterator[str]:
    said = meanings(table)
    yield from _heading(table.name, _first_line(RECORDS.get(table.name)))
    for column in table.columns:
        yield _row(column.name, _kind(column.type), said[column.name], null=bool(column.nullable))


def view_section(name: str) -> Iterator[str]:
    """A column has the meaning of the filter's field of its name, or of the column of its table, or its own."""
    table = metadata.tables.get(name.removeprefix("v_"))
    said = {**({} if table is None else meanings(table)), **OF_VIEWS.get(name, {})}
    said |= {field.name: _sentence(field.meaning) for field in FIELDS.values()} if name == "v_trajectories" else {}
    yield from _heading(name, "")
    for column, expression in VIEWS[name].selected_columns.items():
        yield _row(column, _kind(expression.type), said.get(column, ""), null=False)


def token_section() -> Iterator[str]:
    yield from _heading("Tokens", "What `replay.open(RUN).tokens()` gives a row of, with `trajectory`, the row's id.")
    for name, (kind, meaning) in TOKEN_COLUMNS.items():
        yield _row(name, kind, _sentence(meaning), null=False)


def _heading(name: str, text: str) -> list[str]:
    return [f"\n### {name}\n", *([f"{text}\n"] if text else []), "| column | type | meaning |", "|---|---|---|"]


def _row(name: str, kind: str, meaning: str, *, null: bool) -> str:
    cells = [f"`{name}`", f"{kind} or null" if null else kind, meaning.replace("|", "\\|")]
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def _kind(kind: sa.types.TypeEngine[object]) -> str:
    names = {sa.Boolean: "boolean", sa.Integer: "integer", sa.Numeric: "real", sa.Float: "real", sa.LargeBinary: "blob"}
    return next((name for each, name in names.items() if isinstance(kind, each)), "text")


def _first_line(record: type | None) -> str:
    text = " ".join((record.__doc__ or "").split()) if record else ""
    return (
        "" if record and text.startswith(f"{record.__name__}(") else text
    )  # a dataclass without one gets its signature


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def page() -> str:
    views = [line for name in VIEWS for line in view_section(name)]
    tables = [line for name in sorted(metadata.tables) for line in table_section(metadata.tables[name])]
    sections = [INTRODUCTION, ABOUT_VIEWS, *views, *token_section(), "", "## Tables", *tables]
    return "\n".join(sections) + "\n"


if __name__ == "__main__":
    print(page(), end="")
