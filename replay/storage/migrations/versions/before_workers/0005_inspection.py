"""What people look at: how ratios and drift were spread in each update, how often each row was used, and
a run's rows in one order to the last."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


_COUNT_USES = (
    "UPDATE trajectories SET uses = (SELECT count(*) FROM draws WHERE trajectory = trajectories.id "
    "AND state = 'committed') WHERE id IN (SELECT trajectory FROM draws)"
)


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
    op.add_column("trajectories", sa.Column("uses", sa.BigInteger, nullable=False, server_default="0"))
    op.execute(_COUNT_USES)
    op.drop_index("trajectories_by_run", "trajectories")
    op.create_index("trajectories_by_run", "trajectories", ["run", "iteration", "slot", "id"])
