"""Figures of each of several environments, apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from agentloop.environments import RunEnvironments
from replay.records import Trajectory


def environment_metrics(environments: RunEnvironments, rows: Sequence[Trajectory]) -> dict[str, float]:
    """How many fresh episodes each had in an iteration, and their success and reward; nothing where there is one
    environment."""
    if len(environments.all) == 1:
        return {}
    metrics: dict[str, float] = {}
    for factory in environments.all:
        records = [row.record for row in rows if row.record.environment == factory.name]
        metrics[f"environment/{factory.name}/episodes"] = float(len(records))
        if records:
            metrics[f"environment/{factory.name}/success"] = statistics.fmean(record.success for record in records)
            metrics[f"environment/{factory.name}/reward"] = statistics.fmean(record.reward for record in records)
    return metrics
