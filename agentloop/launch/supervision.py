"""A launch, from the first role's start to the last one's end."""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from agentloop.errors import UserError
from agentloop.launch.roles import RoleMember
from agentloop.launch.supervised_role import Show, SupervisedRole, was_killed
from agentloop.runs.signals import noted_signals

_DEVICES = "CUDA_VISIBLE_DEVICES"
_LOOK_AGAIN_S = 0.1


def run_roles(members: Sequence[RoleMember], run: Path) -> int:
    """Run the roles until the learner, or all of them, have ended. Raises UserError.

    The exit code is 0, the learner's own, 1 if a role does not stay up, or 128 plus the signal that ended the launch.
    """
    devices, show = assigned_devices(members, os.environ), _console(members)
    roles: list[SupervisedRole] = []
    with noted_signals() as stop:
        try:
            for member in members:
                environment = {**os.environ, **devices.get(member.name, {})}
                roles.append(SupervisedRole(member, run, environment, show=show))
            _watch(roles, stop)
        finally:
            _end(roles, stop)
    if stop:
        return 128 + stop[-1]
    failed = next((role for role in roles if role.failure is not None), None)
    if failed is None:
        return 0
    show("launch", str(failed.failure))
    code = failed.exit_code or 1
    return code if failed.member.leads and not was_killed(code) else 1


def assigned_devices(members: Sequence[RoleMember], environment: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Assign each member its own GPUs, in order; empty where no member needs any. Raises UserError for too few."""
    wanted = sum(member.needs.gpus for member in members)
    if not wanted:
        return {}
    visible = environment.get(_DEVICES)
    there = [str(index) for index, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]
    devices = there if visible is None else [name for name in visible.split(",") if name]
    if wanted > len(devices):
        needs = ", ".join(f"{member.name} {member.needs.gpus}" for member in members if member.needs.gpus)
        raise UserError(
            f"roles must fit this machine's {len(devices)} GPUs, got {wanted} ({needs}). Lower count or gpus."
        )
    given = iter(devices)
    return {member.name: {_DEVICES: ",".join(next(given) for _ in range(member.needs.gpus))} for member in members}


def _watch(roles: Sequence[SupervisedRole], stop: Sequence[int]) -> None:
    while not stop:
        for role in roles:
            role.look()
        gone = [role for role in roles if role.exit_code is not None]
        if len(gone) == len(roles) or any(role.failure or role.member.leads for role in gone):
            return
        time.sleep(_LOOK_AGAIN_S)


def _end(roles: Sequence[SupervisedRole], stop: Sequence[int]) -> None:
    """End the learner first: it may need the others to finish its iteration. A second signal kills all."""
    for leads in (True, False):
        leaving = [role for role in roles if role.member.leads is leads]
        for role in leaving:
            role.ask_to_leave()
        began = time.monotonic()
        for role in leaving:
            while role.runs and time.monotonic() < began + role.member.needs.stop_s and len(stop) < 2:
                time.sleep(_LOOK_AGAIN_S)
            role.end()


def _console(members: Sequence[RoleMember]) -> Show:
    """Return a function that prints members' lines on the terminal, each after its member's name."""
    width, lock = max(len(member.name) for member in members), threading.Lock()

    def show(name: str, line: str) -> None:
        with lock, suppress(BrokenPipeError):  # the terminal is gone; the logs have the line
            print(f"{name:<{width}} | {line}", flush=True)

    return show
