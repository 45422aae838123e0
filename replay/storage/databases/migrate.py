"""Whose tables stand in a database, of which schema, and bringing them to the newest."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from replay.errors import DatabaseRefused
from replay.storage.format.schema import OLDEST, REVISION, VERSION_TABLE, buffer_state, metadata

_MIGRATIONS = Path(__file__).parents[1] / "migrations"
_VERSION = sa.Table(
    VERSION_TABLE,
    sa.MetaData(),
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name=f"{VERSION_TABLE}_pkc"),
)
"""As Alembic makes it."""


def stored_revision(connection: sa.Connection) -> str | None:
    """None: an empty database. Raises nothing for a foreign one: it answers an empty string."""
    tables = sa.inspect(connection).get_table_names()
    if VERSION_TABLE not in tables:
        return "" if tables else None
    return str(connection.scalar(sa.select(sa.column("version_num")).select_from(sa.table(VERSION_TABLE))) or "")


def check_revision(revision: str | None, where: str, *, migrates: bool) -> None:
    """Refuse what is not ours, newer or too old; what is older or nothing yet, unless it is about to be migrated."""
    if revision is None and migrates:
        return
    if revision is None or not re.fullmatch(r"[0-9]{4}", revision):
        raise DatabaseRefused(
            f"database must be one of agentloop's, got tables of something else or none at {where}. "
            "Check that it is the right one."
        )
    if revision > REVISION:
        raise DatabaseRefused(
            f"database must have schema {REVISION} or older, got {revision} at {where}, written by a newer agentloop. "
            "Upgrade agentloop."
        )
    if revision < OLDEST:
        raise DatabaseRefused(
            f"database must have schema {OLDEST} or newer, got {revision} at {where}, which can't be migrated. "
            "Open it with the agentloop that wrote it, or choose another."
        )
    if revision < REVISION and not migrates:
        raise DatabaseRefused(
            f"database must have schema {REVISION}, got {revision} at {where}. Migrate it: agentloop replay migrate"
        )


def migrate(connection: sa.Connection) -> None:
    """To the newest schema within the caller's transaction: the old schema or the new one, never between."""
    if stored_revision(connection) is None:
        metadata.create_all(connection, checkfirst=False)
        connection.execute(buffer_state.insert(), [{"name": "changed", "value": 1}, {"name": "draws", "value": 0}])
        _VERSION.create(connection, checkfirst=False)
        connection.execute(_VERSION.insert().values(version_num=REVISION))
        return
    # Alembic takes longer to import than everything else here.
    from alembic import command
    from alembic.config import Config

    attributes: dict[str, Any] = {"connection": connection}
    config = Config(attributes=attributes)
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    command.upgrade(config, REVISION)
