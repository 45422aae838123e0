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


def _columns(kind: type[sa.types.TypeEngine[Any]], *names: str, null: bool = False) -> list[sa.Column[Any]]:
    return [_column(name, kind, null=null) for name in names]


def upgrade() -> None:
    _sources()
    _trajectories()
    _learning()


def _sources() -> None:
    op.create_table(
        "runs",
        *_columns(sa.Text, "id", "name", "config", "authors", "authors_hash", "code_version", "started_at"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "policies",
        _column("run", sa.Text, "runs.id"),
        _column("version", sa.BigInteger),
        _column("checkpoint", sa.Text, null=True),
        *_columns(sa.Text, "tokenizer_hash", "template_hash", "created_at"),
        sa.PrimaryKeyConstraint("run", "version"),
    )
    op.create_table(
        "tasks",
        *_columns(sa.Text, "hash", "environment", "payload"),
        sa.PrimaryKeyConstraint("hash"),
    )
    op.create_table(
        "groups",
        _column("id", sa.Text),
        _column("run", sa.Text, "runs.id"),
        _column("task", sa.Text, "tasks.hash"),
        *_columns(sa.BigInteger, "iteration", "size"),
        *_columns(sa.Double, "reward_mean", "reward_std", "success_rate"),
        sa.PrimaryKeyConstraint("id"),
    )


def _trajectories() -> None:
    op.create_table(
        "trajectories",
        _column("id", sa.Text),
        _column("run", sa.Text, "runs.id"),
        _column("group_id", sa.Text, "groups.id"),
        _column("task", sa.Text, "tasks.hash"),
        *_columns(sa.BigInteger, "iteration", "slot", "member", "attempt"),
        _column("source", sa.Text),
        _column("reward", sa.Double),
        _column("success", sa.Boolean),
        _column("advantage", sa.Double),
        _column("stop_reason", sa.Text),
        _column("error_kind", sa.Text, null=True),
        *_columns(
            sa.BigInteger,
            "num_turns",
            "num_tool_calls",
            "num_tokens",
            "num_action_tokens",
            "policy_version_min",
            "policy_version_max",
        ),
        *_columns(sa.Double, "temperature", "top_p"),
        _column("top_k", sa.BigInteger),
        _column("logprobs_mode", sa.Text),
        *_columns(sa.Double, "mean_entropy", "mean_behavior_log_prob", "min_behavior_log_prob", null=True),
        *_columns(sa.Text, "environment", "environment_version", "content_hash"),
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
        *_columns(sa.LargeBinary, "token_ids", "authors", "behavior_log_probs", "policy_versions"),
        sa.PrimaryKeyConstraint("trajectory", "position"),
    )
    op.create_table(
        "messages",
        _column("trajectory", sa.Text, "trajectories.id"),
        _column("position", sa.BigInteger),
        *_columns(sa.Text, "author", "role", "content"),
        *_columns(sa.Text, "tool_calls", "name", "tool_call_id", null=True),
        sa.PrimaryKeyConstraint("trajectory", "position"),
    )


def _learning() -> None:
    op.create_table(
        "draws",
        _column("run", sa.Text, "runs.id"),
        *_columns(sa.BigInteger, "iteration", "slot"),
        _column("trajectory", sa.Text, "trajectories.id"),
        _column("stream", sa.Text),
        _column("probability", sa.Double, null=True),
        _column("staleness", sa.BigInteger, null=True),
        _column("state", sa.Text),
        *_columns(
            sa.Double, "advantage", "drift_mean", "drift_max", "ess_share", "approx_kl", "clip_fraction", null=True
        ),
        sa.PrimaryKeyConstraint("run", "iteration", "slot"),
    )
    op.create_index("draws_by_trajectory", "draws", ["trajectory"])
    op.create_table(
        "iterations",
        _column("run", sa.Text, "runs.id"),
        *_columns(sa.BigInteger, "iteration", "policy_version", "planned_fresh", "planned_replay", "fresh", "replay"),
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
