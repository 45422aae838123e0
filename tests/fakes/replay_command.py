"""`agentloop replay ...` as people type it, and the list it prints."""

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa
from click.testing import Result
from typer.testing import CliRunner

from agentloop.cli.replay import app
from replay import ReplayStore, questions
from replay.questions import Patience, Query, QueryResult, Sort
from replay.storage.databases import Location

WIDE = {"COLUMNS": "200", "NO_COLOR": "1"}


def ask(*arguments: Location) -> Result:
    """The answer of one command; whatever goes wrong is told, never raised."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env=WIDE)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def listed(
    store: ReplayStore, run: str | None = None, *, filter: str = "slot >= 0", sort: Sort = Sort.iteration
) -> list[QueryResult]:
    """All rows that the filter holds for."""
    answer = questions.page(store, Query(run, (filter,), sort), limit=10_000, patience=Patience(10_000, 60.0))
    assert answer["after"] is None
    rows: list[QueryResult] = answer["rows"]
    return rows


@contextmanager
def counted() -> Iterator[list[str]]:
    """The statements that any database is asked meanwhile."""
    asked: list[str] = []

    def note(connection: object, cursor: object, statement: str, *_: object) -> None:
        asked.append(statement)

    sa.event.listen(sa.Engine, "before_cursor_execute", note)
    try:
        yield asked
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", note)
