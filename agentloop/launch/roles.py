"""The file of roles: a run's roles, the count and needs of each, and the command of each member.

No other module knows the words of these commands.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, ValidationError

from agentloop.config import RunConfig
from agentloop.config.config_file import load_config, read_keys
from agentloop.errors import UserError
from replay.errors import sentence_for_validation_error
from replay.setting_types import Positive, PositiveFloat, Section

_AGENTLOOP = (sys.executable, "-m", "agentloop")
_RANK_RESTARTS = 3


class RoleSection(Section):
    count: Positive = Field(1, description="How many of it run at once.")
    gpus: int = Field(0, ge=0, description="GPUs each of them gets.")
    stop_s: PositiveFloat = Field(30.0, description="Seconds it may take to leave once it was asked to; then: kill.")
    command: tuple[str, ...] = Field(
        (),
        description="Words to start instead of agentloop's own; {run}, {index} and {port} in them are filled in.",
    )


class LearnerRole(RoleSection):
    stop_s: PositiveFloat = Field(
        90.0, description="Seconds it may take for its iteration and a checkpoint; then: kill."
    )
    count: Literal[1] = Field(1, description="It is one: several processes are its ranks.")
    ranks: Positive = Field(1, description="Processes that learn together on one machine; above 1, torchrun's.")


class EngineRole(RoleSection):
    port: int = Field(8000, ge=1, le=65535, description="Port of the first; the next ones listen on the next ports.")
    options: tuple[str, ...] = Field((), description="Further words for `agentloop engine`, as [--dtype, float32].")


class WorkerRole(RoleSection):
    concurrency: Positive = Field(32, description="Episodes that each of them runs at once.")
    options: tuple[str, ...] = Field((), description="Further words for `agentloop worker`.")


class CommandRole(RoleSection):
    command: tuple[str, ...] = Field(
        min_length=1, description="Words to start; {run}, {index} and {port} in them are filled in."
    )
    port: int | None = Field(None, ge=1, le=65535, description="What {port} is for the first; then the next ones.")


class RolesSection(Section):
    """Roles by name: agentloop's own three, and any others with commands of their own."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, CommandRole] = Field(init=False)

    learner: LearnerRole = Field(default_factory=LearnerRole, description="agentloop train.")
    engine: EngineRole | None = Field(None, description="agentloop engine.")
    worker: WorkerRole | None = Field(None, description="agentloop worker.")

    @property
    def by_name(self) -> dict[str, RoleSection]:
        """The roles of this run, the learner first."""
        known = {"learner": self.learner, "engine": self.engine, "worker": self.worker, **self.__pydantic_extra__}
        return {name: role for name, role in known.items() if role is not None}


class RolesFile(Section):
    config: str = Field(description="The run's configuration.")
    set: tuple[str, ...] = Field((), description="Keys that override it, as [model.path=Qwen/Qwen3-8B].")
    roles: RolesSection = Field(default_factory=RolesSection, description="What runs.")


def load_roles(path: Path) -> RolesFile:
    """Read the file of roles at `path`. Raises UserError: `FILE:LINE: <key> must <rule>, got <value>.`"""
    values, places = read_keys(path)
    roles = values.get("roles")
    if isinstance(roles, dict):  # a role with all of its keys commented out reads as null
        values["roles"] = {name: {} if role is None else role for name, role in roles.items()}
    try:
        return RolesFile.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        place, problem = error.errors(include_url=False)[0]["loc"], sentence_for_validation_error(error)
    key = tuple(part for part in place if isinstance(part, str))  # without the index in a list
    written = next((places[key[:length]] for length in range(len(key), 0, -1) if key[:length] in places), str(path))
    raise UserError(f"{written}: {problem} See configs/cluster.yaml.")


@dataclass(frozen=True)
class RoleMember:
    """One of the `count` members of a role."""

    role: str
    name: str
    """The role's name, with an index where a role can have several members: learner, worker-2."""
    command: tuple[str, ...]
    needs: RoleSection

    @property
    def leads(self) -> bool:
        """Whether the run ends with this member."""
        return self.role == "learner"


def load_run_config(roles: RolesFile) -> RunConfig:
    """Load the run's configuration, with the URLs of the engines that are started."""
    return load_config(Path(roles.config), _overrides(roles))


def role_members(roles: RolesFile, config: RunConfig, run: Path) -> list[RoleMember]:
    """List all members of the run's roles, the learner first. `run` is the run's folder."""
    members: list[RoleMember] = []
    for role, section in roles.roles.by_name.items():
        first = section.port if isinstance(section, (EngineRole, CommandRole)) else None
        for index in range(section.count):
            port = None if first is None else first + index
            name = role if role == "learner" else f"{role}-{index}"
            if section.command:
                command = tuple(_fill_words(section.command, run=run, index=index, port="" if port is None else port))
            else:
                command = tuple(_command_words(roles, config, run, section=section, port=port))
            members.append(RoleMember(role, name, command, section))
    return members


def _fill_words(words: Sequence[str], **values: object) -> Iterator[str]:
    for word in words:
        for name, value in values.items():
            word = word.replace(f"{{{name}}}", str(value))
        yield word


def _command_words(
    roles: RolesFile, config: RunConfig, run: Path, *, section: RoleSection, port: int | None
) -> Iterator[str]:
    if isinstance(section, LearnerRole):
        yield from _learner_program(section.ranks)
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
        yield from ("--max-model-len", str(config.context.max_tokens))
        if config.lora.rank:
            yield from ("--lora-rank", str(config.lora.rank))
        yield from section.options
    elif isinstance(section, WorkerRole):
        yield from (*_AGENTLOOP, "worker", "--run", str(run), "--concurrency", str(section.concurrency))
        yield from section.options


def _learner_program(ranks: int) -> tuple[str, ...]:
    """Return the words before `train`. torchrun restarts all ranks when one dies; they resume from the checkpoint."""
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
