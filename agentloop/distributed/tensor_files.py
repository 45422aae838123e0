"""A training state's tensors in safetensors files: one file from a single process, or a file per rank.

Any number of ranks can read the files of several, each its own part; torch's distributed checkpoint splits them.
"""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from agentloop.distributed.ranks import ALONE, Ranks, is_about_ranks
from agentloop.errors import one_line

_ALONE = "state.safetensors"
_PARTS = "parts.json"
"""The list of the ranks' files. If one were missing unnoticed, its part would read as 0."""
Places = Callable[[str, torch.Size, torch.dtype], Tensor]
"""Returns the tensor into which a stored one of this name, shape and type is read."""


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks = ALONE) -> None:
    """Write tensors to a folder that all ranks see. Each rank writes its part of every sharded tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    if not ranks.several:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / _ALONE)
        return
    if tensors:
        with _raising_first_failure():
            save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    if ranks.index == 0:
        (folder / _PARTS).write_text(json.dumps(sorted(path.name for path in folder.glob("*.safetensors"))))


def read_tensors(folder: Path, *, places: Places | None = None, ranks: Ranks = ALONE) -> dict[str, Tensor]:
    """Read the files of `write_tensors`, into `places` or whole on the CPU. Raises OSError or ValueError for damage."""
    if not ranks.several and (folder / _ALONE).exists():
        return load_file(folder / _ALONE)
    alone = [_ALONE] if (folder / _ALONE).exists() else None
    names = alone or json.loads((folder / _PARTS).read_text())
    lost = [name for name in names if not (folder / name).exists()]
    if lost:
        raise FileNotFoundError(f"{lost[0]} is missing, one of {len(names)}")
    if not names:
        return {}
    stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    tensors: dict[str, Tensor] = {}
    for name, found in stored.items():
        if not isinstance(found, TensorStorageMetadata):
            raise ValueError(f"state must hold tensors alone, got {name!r} of another kind in {folder}.")
        place = places(name, found.size, found.properties.dtype) if places else None
        tensors[name] = torch.zeros(found.size, dtype=found.properties.dtype) if place is None else place
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # on purpose
        with _raising_first_failure():
            load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=not ranks.several)
    return tensors


@contextmanager
def _raising_first_failure() -> Iterator[None]:
    """Raise one rank's error in place of torch's, which has all ranks' stacks and is no Exception."""
    try:
        yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, OSError | SafetensorError) or is_about_ranks(cause):
            raise cause from error
        raise ValueError(one_line(cause)) from error
