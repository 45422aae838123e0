"""Who is compared with whom when a batch holds fresh and replayed trajectories of one task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from agentloop.algorithms.advantages import Member

ReplayBaseline = Literal["stored", "shared", "split", "fresh_only", "leave_one_out"]


def compared_members(
    members: Sequence[Member], baseline: ReplayBaseline, *, whole_batch: bool
) -> list[tuple[int, ...]]:
    """Positions of the members that each member is compared with; none for a replayed one under `stored`.

    - stored: fresh members with their group; a replayed row keeps the advantage it was born with
    - split: besides, replayed members of a task with each other (RePO's split, Li et al. 2025, arXiv 2506.09340)
    - fresh_only: replayed members with the fresh ones of their task
    - shared: all members of a task with each other
    - leave_one_out: likewise, each without itself

    A task's fresh members can be several groups; under `stored`, `split` and `fresh_only` each fresh member is
    compared with its own. With `whole_batch` the batch is one task and its fresh members one group.
    """
    same_task: dict[str, list[int]] = {}
    same_group: dict[tuple[str, str], list[int]] = {}
    for position, member in enumerate(members):
        task, group = _names(member, whole_batch)
        same_task.setdefault(task, []).append(position)
        if not member.replayed:
            same_group.setdefault((task, group), []).append(position)
    compared: list[tuple[int, ...]] = []
    for position, member in enumerate(members):
        task, group = _names(member, whole_batch)
        if baseline == "shared":
            compared.append(tuple(same_task[task]))
        elif baseline == "leave_one_out":
            compared.append(tuple(p for p in same_task[task] if p != position))
        elif not member.replayed:
            compared.append(tuple(same_group[task, group]))
        elif baseline == "stored":
            compared.append(())
        else:
            compared.append(tuple(p for p in same_task[task] if members[p].replayed == (baseline == "split")))
    return compared


def _names(member: Member, whole_batch: bool) -> tuple[str, str]:
    return ("", "") if whole_batch else (member.task, member.group)
