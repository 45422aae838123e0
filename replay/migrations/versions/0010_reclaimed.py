"""What is left of evicted rows, which draws name for ever, stands in a table of its own; of those that had no content
any more, nothing else is left."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"

_FACTS = (
    "id, group_id, slot, member, attempt, source, reward, success, advantage, num_action_tokens, policy_version_min, "
    "parent"
)
_WITHOUT_CONTENT = (
    "state = 'evicted' AND NOT EXISTS (SELECT 1 FROM segments WHERE trajectory = trajectories.id) "
    "AND NOT EXISTS (SELECT 1 FROM messages WHERE trajectory = trajectories.id)"
)


def upgrade() -> None:
    op.create_table(
        "reclaimed",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("group_id", sa.Text, sa.ForeignKey("groups.id"), nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("slot", "member", "attempt")),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("reward", sa.Double, nullable=False),
        sa.Column("success", sa.Boolean, nullable=False),
        sa.Column("advantage", sa.Double, nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("num_action_tokens", "policy_version_min")),
        sa.Column("parent", sa.Text, nullable=True),
        sa.Column("state_reason", sa.Text, nullable=False),
        sa.Column("changed", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("reclaimed_by_change", "reclaimed", ["changed"])
    _draws_name_either()
    op.execute(
        f"INSERT INTO reclaimed SELECT {_FACTS}, coalesce(state_reason, 'evicted'), changed FROM trajectories "  # noqa: S608
        f"WHERE {_WITHOUT_CONTENT}"
    )
    op.execute("DELETE FROM token_scores WHERE trajectory IN (SELECT id FROM reclaimed)")
    op.execute("DELETE FROM trajectories WHERE id IN (SELECT id FROM reclaimed)")
    without_rows = sa.text(
        "UPDATE tasks SET payload = :removed WHERE NOT EXISTS (SELECT 1 FROM trajectories WHERE task = tasks.hash)"
    )
    op.execute(without_rows.bindparams(removed='{"removed":true}'))


def _draws_name_either() -> None:
    """Without the reference to `trajectories`, which SQLite can only leave out of a new table."""
    if op.get_context().dialect.name == "postgresql":
        op.drop_constraint("draws_trajectory_fkey", "draws", type_="foreignkey")
        return
    old = sa.Table("draws", sa.MetaData(), autoload_with=op.get_bind(), resolve_fks=False)
    op.rename_table("draws", "draws_before")
    for name in ("draws_by_trajectory", "reservations_by_sequence"):
        op.drop_index(name, "draws_before")
    columns = [
        sa.Column(column.name, column.type, nullable=column.nullable, server_default=column.server_default)
        for column in old.columns
    ]
    op.create_table(
        "draws",
        *columns,
        sa.PrimaryKeyConstraint("run", "iteration", "slot"),
        sa.ForeignKeyConstraint(["run"], ["runs.id"]),
    )
    op.execute("INSERT INTO draws SELECT * FROM draws_before")
    op.drop_table("draws_before")
    op.create_index("draws_by_trajectory", "draws", ["trajectory"])
    op.create_index("reservations_by_sequence", "draws", ["sequence"], sqlite_where=sa.text("state = 'reserved'"))
