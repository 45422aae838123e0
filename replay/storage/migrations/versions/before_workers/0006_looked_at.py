"""A file's index of a run's rows holds what lists are sorted by and statistics count: no rows are read for them."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    if op.get_context().dialect.name != "sqlite":
        return
    op.drop_index("trajectories_by_run", "trajectories")
    columns = ["run", "iteration", "slot", "id", "group_id", "source", "reward", "success", "advantage", "stop_reason"]
    columns += ["num_turns", "num_tool_calls", "num_tokens", "num_action_tokens", "policy_version_min", "state", "uses"]
    op.create_index("trajectories_by_run", "trajectories", columns)
