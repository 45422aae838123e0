"""The first schema.

Written out, not taken from `replay.storage.format.schema`: that module moves on, a released migration does not.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def _column(
    name: str, kind: type[sa.types.TypeEngine[Any]], target: str | None = None, *, null: bool = False
) -> sa.Column[Any]:
    reference = [sa.ForeignKey(target)] if target else []
    return sa.Column(name, kind, *reference, nullable=null)


def upgrade() -> None:
    _sources()
    _trajectories()
    _learning()


def _sources() -> None:
    op.create_table(
        "runs",
        _column("id", sa.Text),
        _column("name", sa.Text),
        _column("config", sa.Text),
        _column("authors", sa.Text),
        _column("authors_hash", sa.Text),
        _column("code_version", sa.Text),
        _column("started_at", sa.Text),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "policies",
        _column("run", sa.Text, "runs.id"),
        _column("version", sa.BigInteger),
        _column("checkpoint", sa.Text, null=True),
        _column("tokenizer_hash", sa.Text),
        _column("template_hash", sa.Text),
        _column("created_at", sa.Text),
        sa.PrimaryKeyConstraint("run", "version"),
    )
    op.create_table(
        "tasks",
        _column("hash", sa.Text),
        _column("environment", sa.Text),
        _column("payload", sa.Text),
        sa.PrimaryKeyConstraint("hash"),
    )
    op.create_table(
        "groups",
        _column("id", sa.Text),
        _column("run", sa.Text, "runs.id"),
        _column("task", sa.Text, "tasks.hash"),
        _column("iteration", sa.BigInteger),
        _column("size", sa.BigInteger),
        _column("reward_mean", sa.Double),
        _column("reward_std", sa.Double),
        _column("success_rate", sa.Double),
        sa.PrimaryKeyConstraint("id"),
    )


def _trajectories() -> None:
    op.create_table(
        "trajectories",
        _column("id", sa.Text),
        _column("run", sa.Text, "runs.id"),
        _column("group_id", sa.Text, "groups.id"),
        _column("task", sa.Text, "tasks.hash"),
        _column("iteration", sa.BigInteger),
        _column("slot", sa.BigInteger),
        _column("member", sa.BigInteger),
        _column("attempt", sa.BigInteger),
        _column("source", sa.Text),
        _column("reward", sa.Double),
        _column("success", sa.Boolean),
        _column("advantage", sa.Double),
        _column("stop_reason", sa.Text),
        _column("error_kind", sa.Text, null=True),
        _column("num_turns", sa.BigInteger),
        _column("num_tool_calls", sa.BigInteger),
        _column("num_tokens", sa.BigInteger),
        _column("num_action_tokens", sa.BigInteger),
        _column("policy_version_min", sa.BigInteger),
        _column("policy_version_max", sa.BigInteger),
        _column("temperature", sa.Double),
        _column("top_p", sa.Double),
        _column("top_k", sa.BigInteger),
        _column("logprobs_mode", sa.Text),
        _column("mean_entropy", sa.Double, null=True),
        _column("mean_behavior_log_prob", sa.Double, null=True),
        _column("min_behavior_log_prob", sa.Double, null=True),
        _column("environment", sa.Text),
        _column("environment_version", sa.Text),
        _column("content_hash", sa.Text),
        _column("parent", sa.Text, null=True),
        _column("state", sa.Text),
        _column("state_reason", sa.Text, null=True),
        _column("created_at", sa.Text),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("trajectories_by_group", "trajectories", ["group_id"])
    op.create_index("trajectories_by_run", "trajectories", ["run", "iteration", "slot"])
    candidates = ["state", "iteration", "slot", "run", "id", "group_id", "success"]
    op.create_index("trajectories_by_state", "trajectories", candidates)
    op.create_index("trajectories_by_task", "trajectories", ["task"])
    op.create_table(
        "segments",
        _column("trajectory", sa.Text, "trajectories.id"),
        _column("position", sa.BigInteger),
        _column("reason", sa.Text),
        _column("num_tokens", sa.BigInteger),
        _column("token_ids", sa.LargeBinary),
        _column("authors", sa.LargeBinary),
        _column("behavior_log_probs", sa.LargeBinary),
        _column("policy_versions", sa.LargeBinary),
        sa.PrimaryKeyConstraint("trajectory", "position"),
    )
    op.create_table(
        "messages",
        _column("trajectory", sa.Text, "trajectories.id"),
        _column("position", sa.BigInteger),
        _column("author", sa.Text),
        _column("role", sa.Text),
        _column("content", sa.Text),
        _column("tool_calls", sa.Text, null=True),
        _column("name", sa.Text, null=True),
        _column("tool_call_id", sa.Text, null=True),
        sa.PrimaryKeyConstraint("trajectory", "position"),
    )


def _learning() -> None:
    op.create_table(
        "draws",
        _column("run", sa.Text, "runs.id"),
        _column("iteration", sa.BigInteger),
        _column("slot", sa.BigInteger),
        _column("trajectory", sa.Text, "trajectories.id"),
        _column("stream", sa.Text),
        _column("probability", sa.Double, null=True),
        _column("staleness", sa.BigInteger, null=True),
        _column("state", sa.Text),
        _column("advantage", sa.Double, null=True),
        _column("drift_mean", sa.Double, null=True),
        _column("drift_max", sa.Double, null=True),
        _column("ess_share", sa.Double, null=True),
        _column("approx_kl", sa.Double, null=True),
        _column("clip_fraction", sa.Double, null=True),
        sa.PrimaryKeyConstraint("run", "iteration", "slot"),
    )
    op.create_index("draws_by_trajectory", "draws", ["trajectory"])
    op.create_table(
        "iterations",
        _column("run", sa.Text, "runs.id"),
        _column("iteration", sa.BigInteger),
        _column("policy_version", sa.BigInteger),
        _column("planned_fresh", sa.BigInteger),
        _column("planned_replay", sa.BigInteger),
        _column("fresh", sa.BigInteger),
        _column("replay", sa.BigInteger),
        _column("fraction", sa.Double),
        _column("optimizer_steps", sa.BigInteger),
        sa.PrimaryKeyConstraint("run", "iteration"),
    )
    op.create_table(
        "metrics",
        _column("run", sa.Text, "runs.id"),
        _column("iteration", sa.BigInteger),
        _column("name", sa.Text),
        _column("value", sa.Double, null=True),
        sa.PrimaryKeyConstraint("run", "iteration", "name"),
    )
    op.create_table(
        "sampler_state",
        _column("run", sa.Text, "runs.id"),
        _column("iteration", sa.BigInteger),
        _column("state", sa.Text),
        sa.PrimaryKeyConstraint("run", "iteration"),
    )
