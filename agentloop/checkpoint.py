"""What survives a crash: a new directory per checkpoint, fsynced, renamed, marked complete last.

Nothing is ever written in place, so that a kill at any moment leaves the previous checkpoint whole.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentloop.errors import UserError

COMPLETE = "COMPLETE"
_TENSORS = "state.safetensors"
_VALUES = "state.json"
_RANDOM = "random."


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk; `model` is a Hugging Face folder."""

    folder: Path
    tensors: dict[str, Tensor]
    values: dict[str, Any]

    @property
    def model(self) -> Path:
        return self.folder / "model"


def write_directory(target: Path, fill: Callable[[Path], None]) -> None:
    """Make `target` whole or not at all: filled beside it, fsynced, renamed, then marked complete."""
    unfinished = target.with_name(target.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        fill(unfinished)
        for path in [*unfinished.rglob("*"), unfinished]:
            _fsync(path)
        if target.exists():
            shutil.rmtree(target)
        unfinished.rename(target)
        _fsync(target.parent)
        (target / COMPLETE).touch()
        _fsync(target / COMPLETE)
        _fsync(target)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise UserError(_disk_message(target, error)) from error


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _disk_message(target: Path, error: OSError) -> str:
    try:
        free = f"{shutil.disk_usage(target.parent).free:,} bytes free"
    except OSError:
        free = "free space unknown"
    rule = "have room for the checkpoint" if error.errno == errno.ENOSPC else "be writable"
    return (
        f"run.folder must {rule}, got {error.strerror or error} at {target} ({free}). "
        "Earlier checkpoints are whole: make room and run again with --resume."
    )


def save_checkpoint(
    folder: Path, save_model: Callable[[Path], None], tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> None:
    """Write one checkpoint with the state of every random generator in the process."""

    def fill(target: Path) -> None:
        save_model(target / "model")
        random_tensors, random_values = _random_state()
        save_file({**{k: t.contiguous() for k, t in tensors.items()}, **random_tensors}, target / _TENSORS)
        (target / _VALUES).write_text(json.dumps({**values, "random": random_values}, allow_nan=False))

    write_directory(folder, fill)


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a complete checkpoint; `restore_random` is the caller's, when everything else stands."""
    values = json.loads((folder / _VALUES).read_text())
    return Checkpoint(folder, load_file(folder / _TENSORS), values)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete ones, oldest first."""
    return sorted(path.parent for path in folder.glob(f"*/{COMPLETE}"))


def prune(folder: Path, *, keep: int) -> None:
    """Remove all but the newest `keep` complete directories."""
    for old in complete_checkpoints(folder)[:-keep]:
        # Unmarked first: a kill in the middle must not leave half a directory that looks complete.
        (old / COMPLETE).unlink()
        shutil.rmtree(old)


def _random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {f"{_RANDOM}torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"{_RANDOM}cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    values = {
        "python": [version, list(internal), gauss],
        "numpy": [str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }
    return tensors, values


def restore_random(checkpoint: Checkpoint) -> None:
    """Put every random generator of the process back to where it was."""
    torch.set_rng_state(checkpoint.tensors[f"{_RANDOM}torch"])
    cuda = [t for name, t in sorted(checkpoint.tensors.items()) if name.startswith(f"{_RANDOM}cuda.")]
    if cuda and torch.cuda.device_count() == len(cuda):
        torch.cuda.set_rng_state_all(cuda)
    version, internal, gauss = checkpoint.values["random"]["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = checkpoint.values["random"]["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
