"""The plan of one iteration's batch, as a run makes it and as a dry run does: the same lines of code. No tensors."""

from __future__ import annotations

from collections.abc import Callable

from agentloop.config import RunConfig
from agentloop.task_line import TaskLine
from replay.mixing.mixer import BatchPlan, Mixer
from replay.mixing.request import Availability, DrawRequest


def draw_request(config: RunConfig, *, run: str, iteration: int, policy_version: int) -> DrawRequest:
    """What `iteration` may draw at all; how much of it is for the plan to say."""
    return DrawRequest(run, iteration, policy_version, limits=config.replay.limits)


def plan_iteration(
    mixer: Mixer,
    config: RunConfig,
    line: TaskLine,
    *,
    iteration: int,
    available: Availability,
    task_hash: Callable[[int], str],
) -> tuple[BatchPlan, tuple[int, ...]]:
    """The plan, and the training tasks of its slots. Raises ReplayStarved."""
    plan = mixer.plan(
        iteration=iteration,
        available=available,
        tasks=[task_hash(index) for index in line.upcoming(mixer.num_tasks)],
    )
    return plan, tuple(line.upcoming(plan.num_tasks))
