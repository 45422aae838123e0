"""What is started: each member of each role as one command. No other module knows what these are made of."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentloop.config import RunConfig
from agentloop.config.config_file import load_config
from agentloop.errors import UserError
from agentloop.launch.roles_file import CommandRole, EngineRole, LearnerRole, RoleSection, RolesFile, WorkerRole

_AGENTLOOP = (sys.executable, "-m", "agentloop")
_RANK_RESTARTS = 3


@dataclass(frozen=True)
class RoleMember:
    """One of the `count` of a role."""

    role: str
    name: str
    """The role's, with its index where there can be several: learner, worker-2."""
    command: tuple[str, ...]
    needs: RoleSection

    @property
    def leads(self) -> bool:
        """Whether the run ends with it."""
        return self.role == "learner"


def load_run_config(roles: RolesFile) -> RunConfig:
    """The run's configuration, with the engines at the ports where they are started."""
    return load_config(Path(roles.config), _overrides(roles))


def role_members(roles: RolesFile, config: RunConfig, run: Path) -> list[RoleMember]:
    """All commands of the run whose folder is `run`, the learner's first."""
    members: list[RoleMember] = []
    for role, section in roles.roles.by_name.items():
        first = section.port if isinstance(section, (EngineRole, CommandRole)) else None
        for index in range(section.count):
            port = None if first is None else first + index
            name = role if role == "learner" else f"{role}-{index}"
            if section.command:
                command = tuple(_filled(section.command, run=run, index=index, port="" if port is None else port))
            else:
                command = tuple(_command(roles, config, run, section=section, port=port))
            members.append(RoleMember(role, name, command, section))
    return members


def _filled(words: Sequence[str], **values: object) -> Iterator[str]:
    for word in words:
        for name, value in values.items():
            word = word.replace(f"{{{name}}}", str(value))
        yield word


def _command(
    roles: RolesFile, config: RunConfig, run: Path, *, section: RoleSection, port: int | None
) -> Iterator[str]:
    if isinstance(section, LearnerRole):
        yield from _ranks(section.ranks)
        yield from ("train", roles.config)
        yield from (word for override in _overrides(roles) for word in ("--set", override))
        yield from ("--run", str(run))
    elif isinstance(section, EngineRole):
        if config.model.path is None:
            raise UserError(
                "model.path must name a model when roles has an engine, got null. Set model.path, or leave the engine "
                "out."
            )
        yield from (*_AGENTLOOP, "engine", config.model.path, "--run", str(run), "--port", str(port))
        if config.engine.served_model_name is not None:
            yield from ("--name", config.engine.served_model_name)
        yield from ("--max-model-len", str(config.context.max_tokens))
        if config.lora.rank:
            yield from ("--lora-rank", str(config.lora.rank))
        yield from section.options
    elif isinstance(section, WorkerRole):
        yield from (*_AGENTLOOP, "worker", "--run", str(run), "--concurrency", str(section.concurrency))
        yield from section.options


def _ranks(ranks: int) -> tuple[str, ...]:
    """What starts the learner. torchrun starts all its ranks again when one dies; they go on from the checkpoint."""
    if ranks == 1:
        return _AGENTLOOP
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    # Without the dashes torchrun reads --run as a beginning of its own --run-path.
    return (*torchrun, "--max-restarts", str(_RANK_RESTARTS), "-m", "--", "agentloop")


def _overrides(roles: RolesFile) -> tuple[str, ...]:
    engine = roles.roles.engine
    if engine is None or engine.command:
        return roles.set
    # `agentloop engine` listens on its own machine only.
    urls = ", ".join(f"http://127.0.0.1:{engine.port + index}" for index in range(engine.count))
    return (*roles.set, f"engine.urls=[{urls}]")
