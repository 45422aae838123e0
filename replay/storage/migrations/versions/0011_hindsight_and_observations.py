"""What failed episodes did solve belongs to its run and is found from them; what deterministic tools answer is kept."""

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
    op.create_table(
        "observations",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("task", sa.Text, sa.ForeignKey("tasks.hash"), nullable=False),
        sa.Column("environment", sa.Text, nullable=False),
        sa.Column("parent", sa.Text, nullable=True),
        sa.Column("tool", sa.Text, nullable=False),
        sa.Column("arguments", sa.Text, nullable=False),
        sa.Column("content", sa.Text, nullable=False),
        sa.Column("checksum", sa.Text, nullable=False),
    )
    op.create_index("observations_by_task", "observations", ["task"])
