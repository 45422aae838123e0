"""A launch, from the first role's start to the last one's end. `--on local`: the roles are children of this program."""

import os
import signal
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from agentloop.errors import UserError
from agentloop.launch.roles import RoleMember
from agentloop.launch.supervised_role import Show, SupervisedRole, was_killed

DEVICES = "CUDA_VISIBLE_DEVICES"
_LOOK_AGAIN_S = 0.1


def launch_here(members: Sequence[RoleMember], run: Path) -> int:
    """Run the roles here until the learner, or all of them, have ended; return the exit code. Raises UserError."""
    devices, launch = assigned_devices(members, os.environ), uuid.uuid4().hex
    show = console(members)
    return supervise(
        (
            SupervisedRole(member, run, {**os.environ, **devices.get(member.name, {})}, launch=launch, show=show)
            for member in members
        ),
        show,
    )


def assigned_devices(members: Sequence[RoleMember], environment: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Assign each member its own GPUs, in order; empty where no member needs any. Raises UserError for too few."""
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
            "or launch --on ray."
        )
    given = iter(devices)
    return {member.name: {DEVICES: ",".join(next(given) for _ in range(member.needs.gpus))} for member in members}


class Supervised(Protocol):
    """A supervised role as the launch uses it, on this machine or on Ray."""

    member: RoleMember
    exit_code: int | None
    failure: str | None

    @property
    def runs(self) -> bool: ...
    def look(self) -> None: ...
    def ask_to_leave(self) -> None: ...
    def end(self) -> None: ...


def supervise(started: Iterable[Supervised], show: Show) -> int:
    """Supervise the roles until the learner or all of them have ended. Iterating `started` starts them.

    The exit code is 0, the learner's own, 1 if a role does not stay up, or 128 plus the signal that ended the launch.
    """
    roles: list[Supervised] = []
    with _noted_signals() as stop:
        try:
            for role in started:
                roles.append(role)
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


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Collect, within the block, the numbers of Ctrl-C and SIGTERM signals, which have no other effect."""
    asked: list[int] = []
    before = {number: signal.signal(number, lambda n, _: asked.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _watch(roles: Sequence[Supervised], stop: Sequence[int]) -> None:
    while not stop:
        for role in roles:
            role.look()
        gone = [role for role in roles if role.exit_code is not None]
        if len(gone) == len(roles) or any(role.failure or role.member.leads for role in gone):
            return
        time.sleep(_LOOK_AGAIN_S)


def _end(roles: Sequence[Supervised], stop: Sequence[int]) -> None:
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


def console(members: Sequence[RoleMember]) -> Show:
    """Return a function that prints members' lines on the terminal, each after its member's name."""
    width, lock = max(len(member.name) for member in members), threading.Lock()

    def show(name: str, line: str) -> None:
        with lock, suppress(BrokenPipeError):  # the terminal is gone; the logs have the line
            print(f"{name:<{width}} | {line}", flush=True)

    return show
