"""Tensors of a training state in safetensors files: one file of a process alone, a file per rank of several.

What several ranks wrote any number of ranks reads, each its own part; torch's distributed checkpoint does the cutting.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from agentloop.ranks import ALONE, Ranks

_ALONE = "state.safetensors"

Places = Callable[[str, torch.Size, torch.dtype], Tensor]
"""Where a stored tensor of this name, shape and type is to be read to."""


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks = ALONE) -> None:
    """Into a folder that all ranks see. On several ranks each writes its part of every sharded tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    if not ranks.several:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / _ALONE)
    elif tensors:
        save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def read_tensors(folder: Path, *, places: Places | None = None, ranks: Ranks = ALONE) -> dict[str, Tensor]:
    """What `write_tensors` wrote, whoever reads it; into `places`, whole tensors on the CPU without them.

    Raises OSError or ValueError for files that are not there or damaged.
    """
    if not ranks.several and (folder / _ALONE).exists():
        return load_file(folder / _ALONE)
    if not any(folder.glob("*.safetensors")):
        return {}
    stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    tensors: dict[str, Tensor] = {}
    for name, found in stored.items():
        if not isinstance(found, TensorStorageMetadata):
            raise ValueError(f"state must hold tensors alone, got {name!r} of another kind in {folder}.")
        place = places(name, found.size, found.properties.dtype) if places else None
        tensors[name] = torch.zeros(found.size, dtype=found.properties.dtype) if place is None else place
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # so it is, and is to be
        load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=not ranks.several)
    return tensors
