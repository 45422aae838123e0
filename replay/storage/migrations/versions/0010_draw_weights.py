"""A draw says what its row's loss was multiplied by, so that the update can be made again from what is stored."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("draws", sa.Column("weight", sa.Double, nullable=True))
