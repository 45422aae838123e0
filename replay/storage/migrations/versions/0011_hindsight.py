"""Rows that say what a failed episode did solve: they belong to their run alone, and are found by that episode."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    imported = sa.text("source <> 'self' and source <> 'gateway' and source <> 'hindsight'")
    op.drop_index("imports_by_change", "trajectories")
    op.create_index("imports_by_change", "trajectories", ["changed"], sqlite_where=imported, postgresql_where=imported)
    made = sa.text("parent is not null")
    op.create_index("trajectories_by_parent", "trajectories", ["parent"], sqlite_where=made, postgresql_where=made)
