"""What forgetting leaves: nothing in any file of the database, by a loop over the schema."""

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from replay import ReplayStore
from replay.storage.databases import Location
from replay.storage.format import schema
from tests.fakes.databases import Databases
from tests.fakes.records import sql
from tests.replay.storage.filled_buffers import fill

SECRET = "jane-lives-at-31-07-19"
LONG = SECRET + "".join(random.Random(0).choices([chr(code) for code in range(256, 512)], k=5000))
"""No database makes it shorter, and PostgreSQL puts it elsewhere than the rest of its row."""

OF_RUNS = {
    *("runs", "run_labels", "policies", "groups", "iterations", "metrics", "sampler_state", "draws", "tickets"),
    *("planned_batches", "workers", "engines", "saved_views", "buffer_state", "reclaimed"),
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
        sql(location, f'update "{column.table.name}" set "{column.name}" = ?', value)


def files(location: Location, databases: Databases) -> list[Path]:
    """Of the database, as they are on the disk."""
    if isinstance(location, Path):
        return [path for path in location.parent.iterdir() if path.name.startswith(location.name)]
    databases.server.ask("checkpoint")
    ((oid,),) = sql(location, "select oid from pg_database where datname = current_database()")
    return [path for path in (databases.server.folder / "data/base" / str(oid)).iterdir() if path.is_file()]


def holding(location: Location, databases: Databases) -> list[str]:
    return [path.name for path in files(location, databases) if SECRET.encode() in path.read_bytes()]


@pytest.mark.every_database
def test_forgetting_leaves_no_byte_of_any_text_or_blob_in_any_file(location: Location, databases: Databases) -> None:
    fill(location)
    put_secrets(location)
    if not isinstance(location, Path):
        sql(location, "analyze")  # as autovacuum does: samples of values are tables of the database, too
    assert holding(location, databases)
    with closing(ReplayStore.open(location)) as store:
        store.forget(sa.true(), held_out="*", dry_run=False)
        assert holding(location, databases) == []
    assert holding(location, databases) == []
