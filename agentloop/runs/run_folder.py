"""Where a run lives on disk: <run.folder>/<run.name>-001 and what is inside."""

import errno
import fcntl
import json
import os
import re
import shlex
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from os.path import isdir, isfile, normpath  # unlike those of paths they take any text
from pathlib import Path
from typing import IO, Any, Literal

from agentloop.config import RunConfig
from agentloop.config.config_file import load_plain, to_plain
from agentloop.config.sections.model import ComputeSection
from agentloop.config.sections.run_section import CheckpointSection
from agentloop.errors import UserError
from context.wording import excerpt
from replay.locate import DATABASE, LOCK, MODEL, start_folder
from replay.storage.databases import Location

COMPLETE = "COMPLETE"
"""Written last into a folder: one without it is not whole."""
LOGS = "logs"
"""Folder of what the roles of a launched run print."""
_IDENTITY = "run.json"
_SHOWN = 200
"""Characters of a setting in a message: `context.template` is the text of one."""
_OWN = "run:"
"""Prefix of a stored path that is relative to the run's folder, so that the folder can be moved."""
_OWN_PATHS = (("tasks", "data"), ("model", "path"))
"""Settings that may hold such a path."""
_FILES = ("model", "environment", "environments", "tasks", "reward", "replay", "loss", "metrics", "sft")
"""Sections whose texts may name files of the user's; others hold words that a file could be called by chance."""
_FOLDERS = ("path", "data", "attach")
"""Keys below them that may name folders."""


@dataclass(frozen=True)
class RunFolder:
    path: Path
    run_id: str
    config: RunConfig
    environments: tuple[str, ...] = ()
    """Digests of the sources that the environment has had, oldest first; none before it was loaded, and for sft."""

    @property
    def database(self) -> Location:
        return self.config.replay.database or self.path / DATABASE

    @property
    def model(self) -> Path:
        """The trained model, a Hugging Face folder: a link to the newest checkpoint's; of sft, a folder of its own."""
        return self.path / MODEL

    @property
    def start(self) -> Path:
        """What the run began with: its tokenizer, and the first weights of the built-in model."""
        return start_folder(self.path)

    def stored_config(self) -> dict[str, Any]:
        """The configuration as it is written down, with what lies in this folder named from here."""
        return _config_to_store(self.config, self.path)

    def name_model(self, checkpoint: Path) -> None:
        """The trained model is that of this checkpoint from now on."""
        with explaining_disk_errors(self.model):
            if self.model.is_dir() and not self.model.is_symlink():  # as a copy that follows links leaves it
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

    def lock(self) -> IO[str]:
        """Held while a process trains here; released when it ends, however it ends."""
        with explaining_disk_errors(self.path / LOCK):
            stream = (self.path / LOCK).open("w")
        # A tool's forked process would hold the lock on after the trainer was killed.
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
    """Complete checkpoints, or policies, in a folder of them, oldest first."""
    marks = folder.glob(f"*/{COMPLETE}")
    return sorted((mark.parent for mark in marks if mark.parent.name.isdecimal()), key=lambda path: int(path.name))


def create_run_folder(config: RunConfig, path: Path | None = None) -> RunFolder:
    """A new run in `path`, or under the next free number of its name; earlier runs are never touched."""
    path = claim_run_folder(config) if path is None else path
    began = {"id": uuid.uuid4().hex, "began_in": str(Path.cwd())}
    _change_identity(path, **began, name=config.run.name, config=_config_to_store(config, path))
    return open_run_folder(path)


def claim_run_folder(config: RunConfig) -> Path:
    """The folder of a run to come, empty: no other run is made there but by its path."""
    parent, name = Path(config.run.folder), config.run.name
    with explaining_disk_errors(parent):
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
    """A run that could not be put together leaves nothing to stumble over, but for logs of what was started with it."""
    for path in filter(_is_no_log, folder.path.iterdir()):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    with suppress(OSError):  # where there are logs
        folder.path.rmdir()


def refuse_used_folder(path: Path) -> None:
    """Raises UserError for a folder without a run that holds what no run made: one that is refused is removed."""
    if path.is_dir() and not has_run(path) and any(map(_is_no_log, path.iterdir())):
        raise UserError(f"--run must be a run, or a folder that is empty or new, got {str(path)!r}. Name another.")


def _is_no_log(path: Path) -> bool:
    return path.name != LOGS and path.suffix != ".log"


def record_environment(folder: RunFolder, source: str) -> None:
    """Note that rows are collected with the environment of this digest from now on."""
    if folder.environments[-1:] != (source,):
        _change_identity(folder.path, environments=[*folder.environments, source])


def record_config(folder: RunFolder) -> str | None:
    """Note that the run goes on with the configuration of `folder`. What is another than before, in words."""
    before, now = to_plain(open_run_folder(folder.path).config), to_plain(folder.config)
    changed = [(part, key) for part, keys in _MAY_CHANGE.items() for key in keys if before[part][key] != now[part][key]]
    if not changed:
        return None
    # All else is the same, and names files from where the run began.
    stored = json.loads((folder.path / _IDENTITY).read_text())["config"]
    for part, key in (*changed, ("run", "schedule_iterations")):
        stored[part][key] = now[part][key]
    _change_identity(folder.path, config=stored)
    texts = [f"{part}.{key} is {now[part][key]} now, after {before[part][key]}" for part, key in changed]
    if ("run", "iterations") in changed:
        texts.append(f"schedules stay laid over {folder.config.run.schedule_length} iterations")
    if any(part in ("batch", "compute") or key == "threads" for part, key in changed):
        texts.append("from here on weights differ by rounding from those of an unbroken run")
    return "; ".join(texts)


def _config_to_store(config: RunConfig, folder: Path) -> dict[str, Any]:
    plain, here = to_plain(config), folder.absolute()
    for section, key in _OWN_PATHS:
        place = Path(plain[section][key] or "/").absolute()
        if place.is_relative_to(here) and place.exists():
            plain[section][key] = _OWN + place.relative_to(here).as_posix()
    return plain


def _read_config(plain: dict[str, Any], folder: Path, began_in: Path) -> RunConfig:
    if began_in != Path.cwd():
        below = folder.absolute().is_relative_to(Path.cwd())  # a copied project is one of its own
        plain |= {section: _relocate(began_in, plain[section], section, below) for section in _FILES}
        plain["context"]["parser"] = _relocate(began_in, plain["context"]["parser"], "parser", below)
    for section, key in _OWN_PATHS:
        name = plain[section][key]
        if name is not None and name.startswith(_OWN):
            plain[section][key] = str(folder / name.removeprefix(_OWN))
    return load_plain(plain)


def _relocate(began_in: Path, value: Any, key: str, below: bool) -> Any:
    """A setting with its files as named from where the run began, unless the run is `below` here and they are here."""
    if isinstance(value, Mapping):
        inner = [(name, each, "attach" if key == "attach" else name) for name, each in value.items()]
        return {name: _relocate(began_in, each, own, below) for name, each, own in inner}
    if isinstance(value, list):
        return [_relocate(began_in, each, key, below) for each in value]
    if not isinstance(value, str) or not value:
        return value
    if key == "agent":  # a command, of whose words some are files
        return re.sub(r"\S+", lambda word: _relocate_word(began_in, word[0], below), value)
    file, colon, name = value.rpartition(":") if ".py:" in value else (value, "", "")
    folder = f"{file.partition('{split}')[0]}x/.." if "{split}" in file else file

    def is_in(root: Path) -> bool:
        return isfile(root / file) or (key in _FOLDERS and isdir(normpath(root / folder)))

    # Other words may be what a file is called by chance.
    named = key in _FOLDERS or "/" in file or "." in file
    return f"{began_in / file}{colon}{name}" if named and is_in(began_in) and not (below and is_in(Path())) else value


def _relocate_word(began_in: Path, word: str, below: bool) -> str:
    found = _relocate(began_in, word, "", below)
    return word if found == word else shlex.quote(found)


def _change_identity(path: Path, **changed: Any) -> None:
    identity = json.loads((path / _IDENTITY).read_text()) if has_run(path) else {}
    unfinished = path / f"{_IDENTITY}.unfinished"
    with explaining_disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps({**identity, **changed}, indent=1))
        os.replace(unfinished, path / _IDENTITY)


def open_run_folder(path: Path) -> RunFolder:
    """An existing run; the error says what is missing."""
    try:
        identity: dict[str, Any] = json.loads((path / _IDENTITY).read_text())
        environments, began_in = tuple(identity.get("environments", ())), Path(identity["began_in"])
        return RunFolder(path, identity["id"], _read_config(identity["config"], path, began_in), environments)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"RUN must be a run folder with a run.json, got {str(path)!r}. See: ls runs") from error


def config_to_resume(path: Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration of the run in this folder with overrides over it, to go on with."""
    return load_plain(to_plain(open_run_folder(path).config), overrides, source=str(path))


def run_to_continue(config: RunConfig, *, resume: bool | Literal["auto"]) -> Path | None:
    """The newest run of that name; None: a new one is to be begun. Raises UserError where `resume` is True."""
    numbered = _numbered(Path(config.run.folder), config.run.name) if resume else []
    runs = [(number, path) for number, path in numbered if has_run(path)]
    if not runs and resume is True:
        raise UserError(
            f"--resume must find a run named {config.run.name!r} under {config.run.folder}, got none. Start one "
            "without --resume."
        )
    return max(runs)[1] if runs else None


def resumed_run_folder(config: RunConfig, path: Path | None = None) -> RunFolder:
    """The run in `path`, or the newest of that name, to go on with `config`: the run's own, but for `_MAY_CHANGE`."""
    path = path or run_to_continue(config, resume=True)
    assert path is not None, "it is refused"
    folder = open_run_folder(path)
    config = keep_schedules(folder.config, config)
    own, others = iteration_settings(folder.config), iteration_settings(config)
    for key in {**own, **others}:
        mine, asked = own.get(key), others.get(key)
        if mine != asked:
            raise UserError(
                f"{key} must be the run's own when resuming {folder.path} ({excerpt(repr(mine), _SHOWN)}), "
                f"got {excerpt(repr(asked), _SHOWN)}. Take it back, or start a new run without --resume."
            )
    return replace(folder, config=config)


def _numbered(parent: Path, name: str) -> list[tuple[int, Path]]:
    """Folders of that name with their numbers, also of starts that were killed before they had a run.json."""
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    matches = [(pattern.fullmatch(path.name), path) for path in parent.glob(f"{name}-*")] if parent.is_dir() else []
    return [(int(match[1]), path) for match, path in matches if match]


@contextmanager
def explaining_disk_errors(
    target: Path, *, option: str = "run.folder", advice: str = "Choose another with --set run.folder=PATH."
) -> Iterator[None]:
    """Turn what the disk does to `target` within into a line with its path and the room that is left."""
    try:
        yield
    except Exception as error:
        failure = _disk_failure(error)
        if failure is None:
            raise
        rule = "have room" if failure.errno in (errno.ENOSPC, errno.EDQUOT) else "be writable"
        free = shutil.disk_usage(next(path for path in (target, *target.parents) if path.is_dir())).free
        raise UserError(
            f"{option} must {rule}, got {failure.strerror or failure} at {failure.filename or target} "
            f"({free:,} bytes free). {advice}"
        ) from error


def _disk_failure(error: Exception) -> OSError | None:
    """The failure of the disk behind an error; None: it is none. Libraries written in Rust only name it in a text."""
    if isinstance(error, OSError):
        return error
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else None


_MAY_CHANGE: Mapping[str, tuple[str, ...]] = {
    "run": ("iterations", "stop_at_success", "threads"),
    "batch": ("micro_batch_tokens", "layout"),
    "compute": tuple(ComputeSection.model_fields),
    "evaluation": ("every",),
    "checkpoint": tuple(CheckpointSection.model_fields),
    "sft": ("every",),
}
"""Keys that a resumed run may have other values of: but for rounding, none changes what an iteration does."""


def iteration_settings(config: RunConfig) -> dict[str, Any]:
    """Its keys but for those that may have another value when a run is resumed, dotted where they are in a section."""
    found: dict[str, Any] = {}
    for part, value in to_plain(config).items():
        keys = {f"{part}.{name}": each for name, each in value.items()} if isinstance(value, dict) else {part: value}
        found |= {key: each for key, each in keys.items() if key.partition(".")[2] not in _MAY_CHANGE.get(part, ())}
    return found | {"run.schedule_iterations": config.run.schedule_length}


def keep_schedules(former: RunConfig, config: RunConfig) -> RunConfig:
    """`config` with the schedules of the run as it was begun: else earlier iterations would have had other rates."""
    length, asked = former.run.schedule_length, config.run.schedule_iterations
    if asked is not None or (former.run.schedule_iterations is None and config.run.iterations == length):
        return config
    values = to_plain(config)
    values["run"] |= {"schedule_iterations": length}
    return load_plain(values, source="resumed run")


def check_length(config: RunConfig, done: int, run: Path) -> None:
    """Raises UserError where the run has made more iterations than it is to have."""
    if config.run.iterations < done:
        raise UserError(
            f"run.iterations must be at least the {done} iterations that {run} has made, got {config.run.iterations}. "
            "Raise it, or start a new run without --resume."
        )
