"""What deterministic tools answered is remembered by task and calls."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.create_table(
        "observations",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("task", sa.Text, sa.ForeignKey("tasks.hash"), nullable=False),
        sa.Column("environment", sa.Text, nullable=False),
        sa.Column("parent", sa.Text, nullable=True),
        sa.Column("tool", sa.Text, nullable=False),
        sa.Column("arguments", sa.Text, nullable=False),
        sa.Column("content", sa.Text, nullable=False),
    )
    op.create_index("observations_by_task", "observations", ["task"])
