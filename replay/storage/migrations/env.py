"""Run by Alembic on a connection whose transaction the caller owns."""

from __future__ import annotations

from alembic import context

from replay.storage.format.schema import VERSION_TABLE, metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
)
with context.begin_transaction():
    context.run_migrations()
