"""Run by Alembic on a connection whose transaction the caller owns."""

from __future__ import annotations

from alembic import context

from replay.schema import VERSION_TABLE, metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    # SQLite rolls schema changes back like any other, once the driver leaves transactions alone.
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
