"""What was in sight when a segment was sampled, and the thinking of messages."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("segments", sa.Column("behavior_context", sa.Text, nullable=False, server_default="plain"))
    op.add_column("messages", sa.Column("reasoning", sa.Text, nullable=True))
