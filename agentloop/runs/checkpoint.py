"""Checkpoints, which survive a crash: each is a new directory, fsynced, renamed, and marked complete last."""

import json
import random
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentloop.config import RunConfig
from agentloop.config.seeds import derive_seed
from agentloop.errors import UserError, explaining_disk, one_line
from agentloop.runs.run_folder import COMPLETE, complete_checkpoints
from replay.storage.databases.disk import flush

_RANDOM_TENSORS = "random.safetensors"
_VALUES = "state.json"
_UNFINISHED = ".unfinished"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk; `model` is a Hugging Face folder."""

    folder: Path
    random: dict[str, Tensor]
    values: dict[str, Any]

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def state(self) -> Path:
        """Folder of the optimizer's and the critic's state."""
        return self.folder / "state"


def write_directory(target: Path, fill: Callable[[Path], object]) -> None:
    """Make `target` whole or not at all: it is filled under another name, fsynced, renamed, then marked complete."""
    unfinished = target.with_name(target.name + _UNFINISHED)
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        with explaining_disk(target, advice="Earlier checkpoints are whole: make room and run again with --resume."):
            unfinished.mkdir(parents=True)
            fill(unfinished)
            for path in [*unfinished.rglob("*"), unfinished]:
                flush(path)
            _remove_marked(target)
            unfinished.rename(target)
            flush(target.parent)
            (target / COMPLETE).touch()
            flush(target / COMPLETE)
            flush(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _remove_marked(directory: Path) -> None:
    if directory.exists():
        # The mark goes first: a kill in the middle must not leave half a directory that looks complete.
        (directory / COMPLETE).unlink(missing_ok=True)
        shutil.rmtree(directory)


def save_checkpoint(
    folder: Path, save_model: Callable[[Path], None], save_state: Callable[[Path], None], values: Mapping[str, Any]
) -> None:
    """Write one checkpoint, with the state of every random generator in the process."""

    def fill(target: Path) -> None:
        save_model(target / "model")
        random_tensors, random_values = _random_state()
        save_state(target / "state")
        save_file(random_tensors, target / _RANDOM_TENSORS)
        (target / _VALUES).write_text(json.dumps({**values, "random": random_values}, allow_nan=False))

    write_directory(folder, fill)


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a complete checkpoint. The caller calls `restore_random` once all other parts are restored."""
    with explaining_damage(folder):
        values = json.loads((folder / _VALUES).read_text())
        if not isinstance(values, dict):
            raise ValueError(f"{_VALUES} holds no mapping")
        return Checkpoint(folder, load_file(folder / _RANDOM_TENSORS), values)


@contextmanager
def explaining_damage(folder: Path) -> Iterator[None]:
    """Turn an error that a damaged checkpoint raises within the block into a UserError that says how to go on."""
    try:
        yield
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise UserError(
            f"checkpoint must be readable, got {one_line(error)} in {folder}. Remove it to resume from the one before."
        ) from error


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    complete = complete_checkpoints(folder)
    return load_checkpoint(complete[-1]) if complete else None


def prune(folder: Path, *, keep: int) -> None:
    """Remove all complete directories but the newest `keep`, and unfinished ones that kills have left."""
    keep_only(folder, [path.name for path in complete_checkpoints(folder)[-keep:]])


def keep_only(folder: Path, names: Collection[str]) -> None:
    """Remove all numbered and unfinished directories in `folder` except those of these names."""
    for path in list(folder.glob("*")):
        if path.name not in names and (path.name.isdecimal() or path.name.endswith(_UNFINISHED)):
            _remove_marked(path)


def _random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    kind, keys, *rest = np.random.get_state(legacy=True)
    return tensors, {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), *rest]}


def restore_random(checkpoint: Checkpoint) -> None:
    """Set every random generator of the process to the checkpoint's state."""
    torch.set_rng_state(checkpoint.random["torch"])
    cuda = [state for name, state in sorted(checkpoint.random.items()) if name.startswith("cuda.")]
    if cuda and torch.cuda.device_count() == len(cuda):
        torch.cuda.set_rng_state_all(cuda)
    version, internal, gauss = checkpoint.values["random"]["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = checkpoint.values["random"]["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


def seed_process(config: RunConfig) -> None:
    """Set threads and seeds of the whole process."""
    torch.set_num_threads(config.run.threads)
    seed = derive_seed(config.run.seed, "process")
    torch.manual_seed(seed)
    # This program uses neither of these two, but a user's environment may.
    random.seed(seed)
    np.random.seed(seed % 2**32)
