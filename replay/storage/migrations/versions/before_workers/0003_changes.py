"""Counters that order changes, what rows are recognised by, and the current log-probs of scored trajectories."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    _counters()
    op.add_column("runs", sa.Column("fingerprint", sa.Text, nullable=True))
    # Rows from before there was a counter are its first change.
    op.add_column("trajectories", sa.Column("changed", sa.BigInteger, nullable=False, server_default="1"))
    op.add_column("trajectories", sa.Column("token_hash", sa.Text, nullable=True))
    op.add_column("trajectories", sa.Column("num_bytes", sa.BigInteger, nullable=True))
    op.add_column("draws", sa.Column("sequence", sa.BigInteger, nullable=False, server_default="0"))
    op.create_index("trajectories_by_change", "trajectories", ["changed"])
    op.create_index("trajectories_by_token_hash", "trajectories", ["token_hash"])
    op.drop_index("trajectories_by_state", "trajectories")
    op.create_index("trajectories_by_state", "trajectories", ["state"])
    op.create_table(
        "token_scores",
        sa.Column("trajectory", sa.Text, sa.ForeignKey("trajectories.id"), nullable=False),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.Column("run", sa.Text, sa.ForeignKey("runs.id"), nullable=False),
        sa.Column("policy_version", sa.BigInteger, nullable=False),
        sa.Column("log_probs", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("trajectory", "position"),
    )


def _counters() -> None:
    counters = op.create_table(
        "buffer_state",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("value", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.bulk_insert(counters, [{"name": "changed", "value": 1}, {"name": "draws", "value": 0}])
