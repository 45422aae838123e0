"""`--on ray`: Ray places the roles, and restarts them elsewhere. Each role is still a command with its own log.

Each member of a role has an actor, and all actors are in one placement group. An actor supervises its command as a
launch on this machine does. Ray restarts an actor if it or its machine has died; the new actor first ends the old
actor's processes.
"""

import os
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentloop.errors import UserError, needing, one_line
from agentloop.launch.roles import RaySection, RoleMember
from agentloop.launch.supervised_role import Show, SupervisedRole
from agentloop.launch.supervision import DEVICES, console, supervise

_USAGE = "RAY_USAGE_STATS_ENABLED"
_MOST_LINES = 10_000
_CALL_S = 20.0
_ALONE_S = 5.0


class RoleActor(SupervisedRole):
    """An actor of Ray that supervises one command."""

    def __init__(self, member: RoleMember, run: Path, folder: str, launch: str, environment: Mapping[str, str]) -> None:
        os.chdir(folder)
        self._unseen: deque[tuple[str, str]] = deque(maxlen=_MOST_LINES)
        own = {DEVICES: os.environ.get(DEVICES, "")} if member.needs.gpus else {}
        super().__init__(member, run, {**environment, **own}, launch=launch, show=self._store_line)

    def _store_line(self, name: str, line: str) -> None:
        self._unseen.append((name, line))

    def look_for_lines(self) -> tuple[list[tuple[str, str]], int | None, str | None, bool]:
        """Look; return the lines since the last look, then exit code, failure, and whether the command runs."""
        self.look()
        lines = [self._unseen.popleft() for _ in range(len(self._unseen))]
        return lines, self.exit_code, self.failure, self.runs


class RemoteRole:
    """The launch's side of a `RoleActor`. It never waits for an actor that is being restarted."""

    def __init__(self, ray: Any, actor: Any, member: RoleMember, show: Show) -> None:
        self._ray, self._actor, self._show = ray, actor, show
        self.member = member
        self.exit_code: int | None = None
        self.failure: str | None = None
        self._runs = True
        self._looking = actor.look_for_lines.remote()

    @property
    def runs(self) -> bool:
        self.look()
        return self._runs

    def look(self) -> None:
        if not self._ray.wait([self._looking], timeout=0)[0]:
            return
        try:
            lines, *state = self._ray.get(self._looking)
        except self._ray.exceptions.RayError as error:
            # The cause is an error of the constructor, or of the command's start.
            cause = getattr(error, "cause", None)
            self.exit_code, self._runs = 1 if cause is None else 2, False
            self.failure = f"{self.member.name} must be placed and start, got {one_line(cause or error)}"
            return
        for name, line in lines:
            self._show(name, line)
        self.exit_code, self.failure, self._runs = state
        self._looking = self._actor.look_for_lines.remote()

    def ask_to_leave(self) -> None:
        self._actor.ask_to_leave.remote()

    def end(self) -> None:
        with suppress(self._ray.exceptions.RayError):
            self._ray.get(self._actor.end.remote(), timeout=_CALL_S)
        self._ray.kill(self._actor)


def launch_on_ray(members: Sequence[RoleMember], run: Path, settings: RaySection) -> int:
    """Run the roles on a Ray cluster until the learner ends; return the exit code. Raises UserError without room."""
    ray = _connect(settings.address)
    try:
        group = _place(ray, members, settings)
        show = console(members)
        return supervise(_start_actors(ray, group, members, run.absolute(), show), show)
    finally:
        ray.shutdown()


def _connect(address: str | None) -> Any:
    os.environ.setdefault(_USAGE, "0")
    with needing("ray", "--on ray"):
        import ray
    try:
        ray.init(address=address, include_dashboard=None, log_to_driver=False, logging_level="WARNING")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"ray.address must be a cluster that answers, got {address}: {one_line(error)}.") from error
    return ray


def _place(ray: Any, members: Sequence[RoleMember], settings: RaySection) -> Any:
    """Make a placement group with a bundle per member. Raises UserError if there is no room in time."""
    bundles = [{"CPU": member.needs.cpus} | ({"GPU": g} if (g := member.needs.gpus) else {}) for member in members]
    # `agentloop engine` listens on its own machine only, so all roles share that machine.
    together = any(member.role == "engine" and not member.needs.command for member in members)
    group = ray.util.placement_group(bundles, strategy="STRICT_PACK" if together else "PACK")
    # A cluster may grow; Ray on this machine alone does not.
    is_shared = bool(settings.address or os.environ.get("RAY_ADDRESS"))
    if not group.wait(settings.placement_timeout_s if is_shared else _ALONE_S):
        free, needs = ray.available_resources(), {member.role: member.needs for member in members}
        wanted = ", ".join(f"{name} {n.count} x {n.cpus} cpus and {n.gpus} gpus" for name, n in needs.items())
        ray.util.remove_placement_group(group)
        raise UserError(
            f"roles must fit {'one machine of ' if together else ''}the cluster, got {wanted} where "
            f"{free.get('CPU', 0):g} cpus and {free.get('GPU', 0):g} gpus are free. Lower a count or cpus, add "
            "machines, or raise ray.placement_timeout_s."
        )
    return group


def _start_actors(ray: Any, group: Any, members: Sequence[RoleMember], run: Path, show: Show) -> Iterator[RemoteRole]:
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    launch = uuid.uuid4().hex
    for index, member in enumerate(members):
        options = {
            "num_cpus": member.needs.cpus,
            "num_gpus": member.needs.gpus,
            "max_restarts": -1,
            "max_task_retries": -1,
            "name": f"{run.name}-{member.name}-{launch}",
            "scheduling_strategy": strategy(group, placement_group_bundle_index=index),
        }
        actor = ray.remote(RoleActor).options(**options).remote(member, run, os.getcwd(), launch, kept)
        yield RemoteRole(ray, actor, member, show)
