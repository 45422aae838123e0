"""Episodes of evaluations are kept apart from all that is trained on."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.create_table(
        "held_out",
        sa.Column("run", sa.Text, sa.ForeignKey("runs.id"), primary_key=True),
        *(sa.Column(name, sa.BigInteger, primary_key=True, autoincrement=False) for name in ("iteration", "number")),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("task", "environment", "environment_version")),
        sa.Column("reward", sa.Double, nullable=False),
        sa.Column("success", sa.Boolean, nullable=False),
        sa.Column("stop_reason", sa.Text, nullable=False),
        sa.Column("error_kind", sa.Text, nullable=True),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("num_turns", "num_tool_calls", "num_messages")),
        sa.Column("said", sa.LargeBinary().with_variant(sa.Text(), "postgresql"), nullable=False),
        sa.Column("checksum", sa.BigInteger, nullable=False),
    )
    op.create_index("held_out_by_task", "held_out", ["run", "task", "iteration"])
