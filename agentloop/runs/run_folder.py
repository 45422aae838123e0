"""The folder of a run, <run.folder>/<run.name>-001, and the files in it."""

import fcntl
import json
import os
import re
import shlex
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from os.path import isdir, isfile, normpath  # unlike those of paths they take any text
from pathlib import Path
from typing import IO, Any, Literal

from agentloop.config import RunConfig
from agentloop.config.config_file import load_plain, to_plain
from agentloop.errors import UserError, explaining_disk
from agentloop.user_code import is_given, shown_name
from context.authors import AuthorTable
from context.wording import excerpt
from replay.locate import BEST, DATABASE, LOCK, MODEL, START
from replay.records import RunRecord
from replay.storage.databases import Location

COMPLETE = "COMPLETE"
"""File that is written last into a folder. A folder without it is not whole."""
LOGS = "logs"
"""Folder for the output of a launched run's roles."""
_IDENTITY = "run.json"
_SHOWN = 200
"""Most characters of a setting in a message; `context.template`, for example, is a long text."""
_OWN = "run:"
"""Prefix of a stored path that is relative to the run's folder, so that the folder can be moved."""
_OWN_PATHS = (("tasks", "data"), ("model", "path"))
"""Settings that may hold a path with this prefix."""
_FILES = ("model", "environment", "environments", "tasks", "reward", "replay", "loss", "metrics", "sft")
"""Sections whose texts may name the user's files. Words of other sections could be file names by chance."""
_FOLDERS = ("path", "data", "attach")
"""Keys in these sections that may name folders."""


@dataclass(frozen=True)
class RunFolder:
    path: Path
    run_id: str
    config: RunConfig
    environments: tuple[str, ...] = ()
    """Digests of the environment's sources in this run, oldest first. There are none for `agentloop sft`."""
    chosen: Mapping[str, str] = field(default_factory=dict)
    """The device and the type of autocast of the run's last start; empty before the first one."""

    @property
    def as_begun(self) -> RunConfig:
        """The configuration to compute with: `compute.autocast: auto` is what it was for the run before."""
        kept = {"autocast": self.chosen["autocast"]} if self.chosen and self.config.compute.autocast == "auto" else {}
        return self.config.model_copy(update={"compute": self.config.compute.model_copy(update=kept)})

    @property
    def database(self) -> Location:
        return self.config.replay.database or self.path / DATABASE

    @property
    def model(self) -> Path:
        """The trained model, a Hugging Face folder: a link to the newest checkpoint's model, or sft's own folder."""
        return self.path / MODEL

    @property
    def start(self) -> Path:
        """The folder of the run's tokenizer, and of the built-in model's first weights."""
        return self.path / START

    def stored_config(self) -> dict[str, Any]:
        """The stored configuration. Paths in this folder are relative to it."""
        plain, here = to_plain(self.config), self.path.absolute()
        for section, key in _OWN_PATHS:
            place = Path(plain[section][key] or "/").absolute()
            if place.is_relative_to(here) and place.exists():
                plain[section][key] = _OWN + place.relative_to(here).as_posix()
        return plain

    def record(self, authors: AuthorTable, fingerprint: Mapping[str, str | int] | None = None) -> RunRecord:
        """The record of the run in its buffer."""
        config, code = self.stored_config(), version("agentloop-replay")
        return RunRecord(self.run_id, self.path.name, config, authors.to_json(), authors.hash, code, fingerprint)

    def name_model(self, checkpoint: Path) -> None:
        """Make this checkpoint's model the trained model of the run."""
        with explaining_disk(self.model):
            if self.model.is_dir() and not self.model.is_symlink():  # as in a copy of the run that followed links
                shutil.rmtree(self.model)
            unfinished = self.path / f"{self.model.name}.unfinished"
            unfinished.unlink(missing_ok=True)
            unfinished.symlink_to((checkpoint / self.model.name).relative_to(self.path))
            os.replace(unfinished, self.model)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def policies(self) -> Path:
        return self.path / "policies"

    @property
    def best(self) -> Path:
        """Holds the policy with the best held-out success, in a folder named by its iteration."""
        return self.path / BEST

    def lock(self) -> IO[str]:
        """Lock the folder for the process that trains here. The lock ends with the process, however that ends."""
        with explaining_disk(self.path / LOCK):
            stream = (self.path / LOCK).open("w")
        # A forked process of a tool would keep the lock after the trainer was killed.
        os.register_at_fork(after_in_child=stream.close)
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            stream.close()
            raise UserError(
                f"run.folder must be used by one process at a time, got {self.path} which another one is training in. "
                "Wait for it, or start a new run."
            ) from error
        return stream


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints or policies in their folder, oldest first."""
    marks = folder.glob(f"*/{COMPLETE}")
    return sorted((mark.parent for mark in marks if mark.parent.name.isdecimal()), key=lambda path: int(path.name))


def create_run_folder(config: RunConfig, path: Path | None = None) -> RunFolder:
    """Create a new run in `path`, or under the next free number of its name."""
    path = claim_run_folder(config) if path is None else path
    folder = RunFolder(path, uuid.uuid4().hex, config)
    began = {"id": folder.run_id, "began_in": str(Path.cwd())}
    _change_identity(path, **began, name=config.run.name, config=folder.stored_config())
    return open_run_folder(path)


def claim_run_folder(config: RunConfig) -> Path:
    """Create the empty folder of a run to come, under the next free number of its name."""
    parent, name = Path(config.run.folder), config.run.name
    with explaining_disk(parent):
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            path = parent / f"{name}-{max((number for number, _ in _numbered(parent, name)), default=0) + 1:03d}"
            try:
                path.mkdir()
            except FileExistsError:
                continue  # another process was faster
            return path


def has_run(path: Path) -> bool:
    """Whether a run has begun in this folder."""
    return (path / _IDENTITY).exists()


def remove_unbegun(folder: RunFolder) -> None:
    """Remove a run that could not begin, except for the logs of roles that were started with it."""
    for path in filter(_is_no_log, folder.path.iterdir()):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    with suppress(OSError):  # where there are logs
        folder.path.rmdir()


def refuse_used_folder(path: Path) -> None:
    """Raises UserError for a folder that has other files and no run: a refused run's folder would be emptied."""
    if path.is_dir() and not has_run(path) and any(map(_is_no_log, path.iterdir())):
        raise UserError(f"--run must be a run, or a folder that is empty or new, got {str(path)!r}. Name another.")


def _is_no_log(path: Path) -> bool:
    return path.name != LOGS and path.suffix != ".log"


def record_environment(folder: RunFolder, source: str) -> None:
    """Note that rows are now collected with the environment of this digest."""
    if folder.environments[-1:] != (source,):
        _change_identity(folder.path, environments=[*folder.environments, source])


def record_chosen(folder: RunFolder, *, device: str, autocast: str) -> str:
    """Store what this start computes on and in. Returns in words that the run goes on on another device, else ""."""
    chosen, before = {"device": device, "autocast": autocast}, folder.chosen.get("device", device)
    if chosen != folder.chosen:
        _change_identity(folder.path, chosen=chosen)
    return f". The run began on {before}: from here on it differs from an unbroken run" * (device != before)


def record_config(folder: RunFolder) -> str | None:
    """Store the configuration of `folder`, with which the run goes on. Returns the changes in words."""
    before, now = (dict(_settings(to_plain(config))) for config in (open_run_folder(folder.path).config, folder.config))
    changed = [path for path in now if _may_change(path) and before.get(path) != now[path]]
    if not changed:
        return None
    # All other settings are unchanged, and name files from where the run began.
    stored = json.loads((folder.path / _IDENTITY).read_text())["config"]
    for path in (*changed, ("run", "schedule_iterations")):
        section = stored
        for name in path[:-1]:
            section = section.setdefault(name, {})
        section[path[-1]] = now[path]
    _change_identity(folder.path, config=stored)
    texts = [f"{'.'.join(path)} is {now[path]} now, after {before.get(path)}" for path in changed]
    if ("run", "iterations") in changed:
        texts.append(f"schedules stay laid over {folder.config.run.schedule_length} iterations")
    if any(path[0] in ("batch", "compute", "model") or path[-1] == "threads" for path in changed):
        texts.append("from here on weights differ by rounding from those of an unbroken run")
    return "; ".join(texts)


def _read_config(plain: dict[str, Any], folder: Path, began_in: Path) -> RunConfig:
    if began_in != Path.cwd():
        below = folder.absolute().is_relative_to(Path.cwd())  # a copied project uses its own files
        plain |= {section: _relocate(began_in, plain[section], section, below) for section in _FILES}
        plain["context"]["parser"] = _relocate(began_in, plain["context"]["parser"], "parser", below)
    for section, key in _OWN_PATHS:
        name = plain[section][key]
        if name is not None and name.startswith(_OWN):
            plain[section][key] = str(folder / name.removeprefix(_OWN))
    return load_plain(plain)


def _relocate(began_in: Path, value: Any, key: str, below: bool) -> Any:
    """Give a setting's files full paths from where the run began, unless the run is `below` here and they are here."""
    if isinstance(value, Mapping):
        inner = [(name, each, "attach" if key == "attach" else name) for name, each in value.items()]
        return {name: _relocate(began_in, each, own, below) for name, each, own in inner}
    if isinstance(value, list):
        return [_relocate(began_in, each, key, below) for each in value]
    if not isinstance(value, str) or not value:
        return value
    if key == "agent":  # a command, some of whose words may be files
        return re.sub(r"\S+", lambda word: _relocate_word(began_in, word[0], below), value)
    file, colon, name = value.rpartition(":") if ".py:" in value else (value, "", "")
    folder = f"{file.partition('{split}')[0]}x/.." if "{split}" in file else file

    def is_in(root: Path) -> bool:
        return isfile(root / file) or (key in _FOLDERS and isdir(normpath(root / folder)))

    # Other words may be file names by chance.
    named = key in _FOLDERS or "/" in file or "." in file
    return f"{began_in / file}{colon}{name}" if named and is_in(began_in) and not (below and is_in(Path())) else value


def _relocate_word(began_in: Path, word: str, below: bool) -> str:
    found = _relocate(began_in, word, "", below)
    return word if found == word else shlex.quote(found)


def _change_identity(path: Path, **changed: Any) -> None:
    identity = json.loads((path / _IDENTITY).read_text()) if has_run(path) else {}
    unfinished = path / f"{_IDENTITY}.unfinished"
    with explaining_disk(path):
        path.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps({**identity, **changed}, indent=1))
        os.replace(unfinished, path / _IDENTITY)


def open_run_folder(path: Path) -> RunFolder:
    """Open an existing run. Raises UserError for a folder that is not one."""
    try:
        identity: dict[str, Any] = json.loads((path / _IDENTITY).read_text())
        environments, began_in = tuple(identity.get("environments", ())), Path(identity["began_in"])
        config, chosen = _read_config(identity["config"], path, began_in), identity.get("chosen", {})
        return RunFolder(path, identity["id"], config, environments, chosen)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"RUN must be a run folder with a run.json, got {str(path)!r}. See: ls runs") from error


def config_to_resume(path: Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration of the run in this folder, with overrides over it, to resume the run with."""
    return load_plain(to_plain(open_run_folder(path).config), overrides, source=str(path))


def how_to_resume(folder: RunFolder) -> str:
    """The command that goes on with the run, or the call for functions that were given as objects, which it lacks."""
    functions = [name for part in folder.config.parts for name in part.environment.functions]
    if any(map(is_given, [*functions, *(row.function for row in folder.config.reward.functions)])):
        return "agentloop.train(..., resume=True)"
    return f"agentloop train {shlex.quote(str(folder.path))} --resume"


def run_to_continue(config: RunConfig, *, resume: bool | Literal["auto"]) -> Path | None:
    """The newest run of the configured name; None to begin a new one, or UserError where `resume` is True."""
    numbered = _numbered(Path(config.run.folder), config.run.name) if resume else []
    runs = [(number, path) for number, path in numbered if has_run(path)]
    if not runs and resume is True:
        raise UserError(
            f"--resume (in Python resume=True) must find a run named {config.run.name!r} under {config.run.folder}, "
            "got none. Start one without it."
        )
    return max(runs)[1] if runs else None


def resumed_run_folder(config: RunConfig, path: Path | None = None) -> RunFolder:
    """The run in `path`, or the newest of that name, with `config`, which may differ in the keys `_MAY_CHANGE`."""
    path = path or run_to_continue(config, resume=True)
    assert path is not None, "run_to_continue raises instead"
    folder = open_run_folder(path)
    config = keep_schedules(folder.config, config)
    own, others = iteration_settings(folder.config), iteration_settings(config)
    for key in {**own, **others}:
        mine, asked = own.get(key), others.get(key)
        if mine != asked:
            mine, asked = (excerpt(shown_name(repr(one)), _SHOWN) for one in (mine, asked))
            raise UserError(
                f"{key} must be the run's own when resuming {folder.path} ({mine}), got {asked}. Take it back, or "
                "start a new run without --resume."
            )
    longest = folder.config.context.max_tokens
    if config.context.max_tokens < longest:
        raise UserError(
            f"context.max_tokens must be at least the run's own when resuming {folder.path} ({longest}), for rows of "
            f"that length are stored, got {config.context.max_tokens}. Raise it, or start a new run without --resume."
        )
    return replace(folder, config=config)


def _numbered(parent: Path, name: str) -> list[tuple[int, Path]]:
    """Folders with this name and their numbers, including folders of starts that were killed early."""
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    matches = [(pattern.fullmatch(path.name), path) for path in parent.glob(f"{name}-*")] if parent.is_dir() else []
    return [(int(match[1]), path) for match, path in matches if match]


_MAY_CHANGE = frozenset(
    {
        # how far a run goes, where it does its work and how fast: none changes what an iteration does but by rounding
        *("run.iterations", "run.stop_at_success", "run.patience", "run.threads"),
        *("evaluation.every", "sft.every", "checkpoint", "model.device", "compute"),
        *("batch.micro_batch_tokens", "batch.layout", "engine", "gateway", "rollout.parallel"),
        # limits that stopped the run, and what becomes of a row, an episode or a step that would stop it
        *("rollout.episode_timeout_s", "rollout.tool_timeout_s", "reward.timeout_s", "reward.on_error"),
        *("tasks.too_long", "context.max_tokens"),
        *("replay.shortfall", "replay.allow_mismatch", "replay.max_quarantined"),
        *("loss.fresh.missing_log_probs", "loss.replay.missing_log_probs"),
        # remedies for numbers that are not finite
        *("optimizer.learning_rate", "critic.optimizer.learning_rate", "sft.learning_rate"),
    }
)
"""Keys, and sections of keys, whose values a resume may change; `context.max_tokens` may only be raised."""


def iteration_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that a resume must not change, by dotted key."""
    found = {".".join(path): value for path, value in _settings(to_plain(config)) if not _may_change(path)}
    return found | {"run.schedule_iterations": config.run.schedule_length}


def _settings(value: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All settings by path. An empty mapping is one, as a list is."""
    if isinstance(value, Mapping) and value:
        for name, each in value.items():
            yield from _settings(each, (*above, name))
    else:
        yield above, value


def _may_change(path: tuple[str, ...]) -> bool:
    own = path[2:] if path[0] == "environments" else path  # each of several has sections of its own
    return any(".".join(own[:length]) in _MAY_CHANGE for length in range(1, len(own) + 1))


def keep_schedules(former: RunConfig, config: RunConfig) -> RunConfig:
    """`config` with the schedule length that the run began with: its first iterations followed that."""
    length, asked = former.run.schedule_length, config.run.schedule_iterations
    if asked is not None or (former.run.schedule_iterations is None and config.run.iterations == length):
        return config
    values = to_plain(config)
    values["run"] |= {"schedule_iterations": length}
    return load_plain(values, source="resumed run")


def check_length(config: RunConfig, done: int, run: Path) -> None:
    """Raises UserError where the run has made more iterations than are configured."""
    if config.run.iterations < done:
        raise UserError(
            f"run.iterations must be at least the {done} iterations that {run} has made, got {config.run.iterations}. "
            "Raise it, or start a new run without --resume."
        )
