"""Weights that updates gave beside those a run stored: equal bit by bit, or by how much they differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import sqlalchemy as sa
import torch
from safetensors import safe_open
from torch import Tensor

from agentloop.distributed.tensor_files import read_tensors
from agentloop.generation.publishing.published_policy import RECORD
from agentloop.models.loading import LoadedModel, muted_libraries
from agentloop.runs.checkpoint import complete_checkpoints, load_checkpoint, readable
from agentloop.runs.run_folder import COMPLETE, RunFolder
from replay.storage.format.schema import iterations
from replay.store import ReplayStore


@dataclass(frozen=True)
class StoredWeights:
    """What a run left on disk of the weights after an iteration: a checkpoint, or a kept policy."""

    iteration: int
    folder: Path
    model: Path
    state: Path | None = None
    """What the weights are trained with; None: a policy has none."""

    @property
    def name(self) -> str:
        """The folder's path in that of the run."""
        return f"{self.folder.parent.name}/{self.folder.name}"


@dataclass(frozen=True)
class ComparedWeights:
    """Two sets of tensors: those that updates made again gave, and the run's own."""

    iteration: int
    stored: str
    """Where the run's own are, relative to its folder."""
    tensors: int
    """Of a checkpoint with those of optimizer and critic."""
    differing: int
    largest: float
    """Greatest difference of one number; 0 where none differs, or no shape is the same."""


def stored_weights(store: ReplayStore, folder: RunFolder, *, after: int) -> dict[int, StoredWeights]:
    """What there is to compare with, by the iteration that made it: a checkpoint, or else a kept policy."""
    query = sa.select(iterations.c.iteration, iterations.c.policy_version).where(iterations.c.run == folder.run_id)
    with store.reading() as connection:
        began_with: dict[int, int] = {row.iteration: row.policy_version for row in connection.execute(query)}
    found: dict[int, StoredWeights] = {}
    for number, version in began_with.items():
        # The policy that the next update began with is what this one made.
        policy = folder.policies / f"{version:06d}"
        if number - 1 > after and (policy / COMPLETE).exists():
            found[number - 1] = StoredWeights(number - 1, policy, policy)
    for path in complete_checkpoints(folder.checkpoints):
        if (number := int(path.name)) > after and number in began_with:
            checkpoint = load_checkpoint(path)
            found[number] = StoredWeights(number, path, checkpoint.model, checkpoint.state)
    return dict(sorted(found.items()))


def compare(loaded: LoadedModel, state: Callable[[], Mapping[str, Tensor]], stored: StoredWeights) -> ComparedWeights:
    """The policy as it is, and what it is trained with (`state`), beside what the run stored.

    Raises UserError for a checkpoint that can't be read.
    """
    with TemporaryDirectory(prefix="agentloop-") as written, readable(stored.folder):
        with muted_libraries():
            loaded.model.save_pretrained(written)
        theirs = _files(stored.model)
        ours = _files(Path(written))
        names = list(ours)
        # What engines are given has a head of its own besides.
        if not (stored.model / RECORD).exists():
            names += [name for name in theirs if name not in ours]
        differences = [_difference(_read(ours, name), _read(theirs, name)) for name in names]
        if stored.state is not None:
            mine, known = state(), read_tensors(stored.state)
            differences += [_difference(mine.get(name), known.get(name)) for name in {**mine, **known}]
    found = [difference for difference in differences if difference is not None]
    return ComparedWeights(stored.iteration, stored.name, len(differences), len(found), max(found, default=0.0))


def _files(folder: Path) -> dict[str, Path]:
    """The file of each tensor."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def _read(files: Mapping[str, Path], name: str) -> Tensor | None:
    if name not in files:
        return None
    with safe_open(files[name], framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def _difference(ours: Tensor | None, theirs: Tensor | None) -> float | None:
    """None where every bit is the same; 0 where they differ in more than their numbers."""
    if ours is None or theirs is None or (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return 0.0
    ours = ours.detach().cpu().contiguous()
    if torch.equal(ours.flatten().view(torch.uint8), theirs.flatten().view(torch.uint8)):
        return None
    return float((ours.double() - theirs.double()).abs().max())
