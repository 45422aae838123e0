"""Episodes that workers collect are tickets with leases; workers, engines and the one learner of a run are known."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.add_column("runs", sa.Column("leader", sa.Text, nullable=True))
    op.add_column("runs", sa.Column("leader_due", sa.Double, nullable=True))
    op.add_column("runs", sa.Column("ended", sa.Boolean, nullable=False, server_default=sa.false()))
    op.create_table(
        "planned_batches",
        sa.Column("run", sa.Text, sa.ForeignKey("runs.id"), nullable=False),
        sa.Column("iteration", sa.BigInteger, nullable=False),
        sa.Column("plan", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("run", "iteration"),
    )
    op.create_table(
        "tickets",
        sa.Column("run", sa.Text, sa.ForeignKey("runs.id"), nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("member", sa.BigInteger, nullable=False),
        sa.Column("task", sa.Text, sa.ForeignKey("tasks.hash"), nullable=False),
        sa.Column("iteration", sa.BigInteger, nullable=False),
        sa.Column("purpose", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("holder", sa.Text, nullable=True),
        sa.Column("fence", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("due", sa.Double, nullable=True),
        sa.Column("tries", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("reason", sa.Text, nullable=True),
        sa.Column("trajectory", sa.Text, nullable=True),
        sa.Column("outcome", sa.Text, nullable=True),
        sa.Column("issued_at", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double, nullable=True),
        sa.Column("closed_at", sa.BigInteger, nullable=True),
        sa.Column("late_at", sa.BigInteger, nullable=True),
        sa.PrimaryKeyConstraint("run", "number", "member"),
    )
    op.create_index("tickets_by_trajectory", "tickets", ["trajectory"], unique=True)
    unclosed = sa.text("closed_at IS NULL")
    columns = ["run", "purpose", "number", "member"]
    op.create_index("unclosed_tickets", "tickets", columns, sqlite_where=unclosed, postgresql_where=unclosed)
    for name in ("workers", "engines"):
        op.create_table(
            name,
            sa.Column("run", sa.Text, sa.ForeignKey("runs.id"), nullable=False),
            sa.Column("id", sa.Text, nullable=False),
            sa.Column("facts", sa.Text, nullable=False),
            sa.Column("started_at", sa.Double, nullable=False),
            sa.Column("seen_at", sa.Double, nullable=False),
            sa.PrimaryKeyConstraint("run", "id"),
        )
