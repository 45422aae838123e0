"""`--on local`: the roles as child processes of this program."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentloop.errors import UserError
from agentloop.launch.role_commands import RoleMember
from agentloop.launch.supervised_role import SupervisedRole
from agentloop.launch.supervision import Console, supervise

DEVICES = "CUDA_VISIBLE_DEVICES"


def launch_here(members: Sequence[RoleMember], run: Path) -> int:
    """Run the roles until the learner, or all of them, have ended; the exit code.

    Raises UserError for GPUs that are not there, or a command that does not start.
    """
    devices = assigned_devices(members, os.environ)
    show = Console(members).show
    environments = {member.name: {**os.environ, **devices.get(member.name, {})} for member in members}
    return supervise((SupervisedRole(member, run, environments[member.name], show=show) for member in members), show)


def assigned_devices(members: Sequence[RoleMember], environment: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """By member, the GPUs it may see: each one's own, in order. Nothing is said where nobody wants any."""
    wanted = sum(member.needs.gpus for member in members)
    if not wanted:
        return {}
    visible = environment.get(DEVICES)
    there = [str(index) for index, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]
    devices = there if visible is None else [name for name in visible.split(",") if name]
    if wanted > len(devices):
        needs = ", ".join(f"{member.name} {member.needs.gpus}" for member in members if member.needs.gpus)
        raise UserError(
            f"roles must fit this machine's {len(devices)} GPUs, got {wanted} ({needs}). Lower count or gpus, "
            "or launch --on ray or slurm."
        )
    given = iter(devices)
    return {member.name: {DEVICES: ",".join(next(given) for _ in range(member.needs.gpus))} for member in members}
