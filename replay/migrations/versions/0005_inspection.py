"""What people look at: how ratios and drift were spread in each update, and orders to read the buffer in."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "histograms",
        sa.Column("run", sa.Text, sa.ForeignKey("runs.id"), nullable=False),
        sa.Column("iteration", sa.BigInteger, nullable=False),
        sa.Column("quantity", sa.Text, nullable=False),
        sa.Column("stream", sa.Text, nullable=False),
        sa.Column("age", sa.Text, nullable=False),
        sa.Column("counts", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("run", "iteration", "quantity", "stream", "age"),
    )
