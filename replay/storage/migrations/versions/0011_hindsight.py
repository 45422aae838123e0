"""Rows that say what a failed episode did solve belong to their run alone: no other one draws them as imported."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    imported = sa.text("source <> 'self' and source <> 'gateway' and source <> 'hindsight'")
    op.drop_index("imports_by_change", "trajectories")
    op.create_index("imports_by_change", "trajectories", ["changed"], sqlite_where=imported, postgresql_where=imported)
