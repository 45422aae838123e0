"""A policy that was published to engines says which bytes it is, and what proves that an engine samples from them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.add_column("policies", sa.Column("sha256", sa.Text, nullable=True))
    op.add_column("policies", sa.Column("probe", sa.Text, nullable=True))
