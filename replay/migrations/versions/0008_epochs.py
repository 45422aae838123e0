"""A run counts how often it was resumed, so that a process whose run was taken over is refused."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("runs", sa.Column("epoch", sa.BigInteger, nullable=False, server_default="0"))
