"""What forgetting leaves: nothing in any file of the database, by a loop over the schema; whom it stops."""

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from replay import ReplayStore
from replay.errors import SessionForgotten
from replay.storage.databases import Location
from replay.storage.format import schema
from replay.storage.sessions import OpenSession
from tests.fakes.databases import Databases
from tests.fakes.random_agents import TODAY, planned_session
from tests.fakes.records import RUN, new_store, sql
from tests.replay.storage.filled_buffers import fill

pytestmark = pytest.mark.every_database

SECRET = "jane-lives-at-31-07-19"
LONG = SECRET + "".join(random.Random(0).choices([chr(code) for code in range(256, 512)], k=5000))
"""No database makes it shorter, and PostgreSQL puts it elsewhere than the rest of its row."""

OF_RUNS = {
    *("runs", "run_labels", "policies", "groups", "iterations", "metrics", "sampler_state", "draws", "tickets"),
    *("planned_batches", "workers", "engines", "buffer_state", "reclaimed"),
}
"""How runs went, what people say of them, and what is left of rows. No other table may keep a word."""
NAMES = {"trajectories.source", "trajectories.parent", "trajectories.state", "tasks.environment", "held_out.task"}


def content_columns() -> Iterator[sa.Column[object]]:
    """Every column of text or bytes, but for names: keys that others refer to, and references to them."""
    targets = {key.column for table in schema.metadata.sorted_tables for key in table.foreign_keys}
    for table in schema.metadata.sorted_tables:
        for column in table.columns if table.name not in OF_RUNS else ():
            is_name = bool(column.foreign_keys) or column in targets or str(column) in NAMES
            if not is_name and column.type.python_type not in (int, float, bool):
                yield column


def put_secrets(location: Location) -> None:
    """A secret in every such column of every row."""
    sql(location, "update tickets set closed_at = 1")  # no worker is still to be given a task
    dialect = (sqlite if isinstance(location, Path) else postgresql).dialect()
    for column in content_columns():
        is_blob = isinstance(column.type.dialect_impl(dialect), sa.LargeBinary)
        value = LONG.encode() if is_blob else SECRET
        changed = sql(location, f'update "{column.table.name}" set "{column.name}" = ? returning 1', value)
        assert changed, f"{column.table.name} must have a row in `filled_buffers`"


def files(location: Location, databases: Databases) -> list[Path]:
    """Of the database, as they are on the disk."""
    if isinstance(location, Path):
        return [path for path in location.parent.iterdir() if path.name.startswith(location.name)]
    databases.server.ask("checkpoint")
    ((oid,),) = sql(location, "select oid from pg_database where datname = current_database()")
    return [path for path in (databases.server.folder / "data/base" / str(oid)).iterdir() if path.is_file()]


def holding(location: Location, databases: Databases) -> list[str]:
    return [path.name for path in files(location, databases) if SECRET.encode() in path.read_bytes()]


def test_forgetting_leaves_no_byte_of_any_text_or_blob_in_any_file(location: Location, databases: Databases) -> None:
    fill(location)
    put_secrets(location)
    if not isinstance(location, Path):
        sql(location, "analyze")  # as autovacuum does: samples of values are tables of the database, too
    # A trainer has it open: of a file there is a log, with what was written last.
    with closing(ReplayStore.open(location)) as trainer, closing(ReplayStore.open(location)) as store:
        trainer.add_metrics(RUN, 1, {"some": 1.0})
        forgotten = store.forget(sa.true(), held_out="another run", dry_run=False)
        assert (forgotten.held_out, forgotten.sessions) == (0, 0)
        assert holding(location, databases)
        assert store.forget(sa.false(), held_out="*", dry_run=False).held_out == 2
        assert holding(location, databases) == []
    assert holding(location, databases) == []


def test_a_request_of_a_forgotten_session_is_refused_by_name(location: Location) -> None:
    with closing(new_store(location)) as store:
        opened = OpenSession("session-1", RUN, TODAY.isoformat())
        store.sessions.open(opened)
        assert store.forget(sa.false(), held_out=RUN, dry_run=True).sessions == 1
        assert [session.id for session in store.sessions.opened(RUN)] == [opened.id]
        store.forget(sa.false(), held_out="*", dry_run=False)
        with pytest.raises(SessionForgotten, match="session must be one that is under way, got one that is not stored"):
            store.sessions.add([(opened.id, planned_session()[0])])


def test_more_sessions_are_forgotten_than_a_server_takes_parameters(location: Location) -> None:
    with closing(new_store(location)) as store:
        numbers = "with recursive n(n) as (select 1 union all select n + 1 from n where n < 70000)"
        sql(location, f"insert into sessions {numbers} select 's' || n, ?, '' from n", RUN)
        assert store.forget(sa.false(), held_out=RUN, dry_run=False).sessions == 70_000
