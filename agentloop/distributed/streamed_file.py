"""A safetensors file of tensors that ranks hold in parts, written one by one: no more than one is whole at a time.

safetensors itself writes only what is whole in memory: see docs/decisions/0013-streamed-weights.md.
"""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentloop.distributed.ranks import Ranks

# In the order in which safetensors writes them.
_NAMES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def stream_tensors(path: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Called on every rank with the same names. Rank 0 writes what safetensors' `save_file` would of the whole tensors.

    A sharded tensor is taken from all ranks, any other from rank 0. Raises ValueError for an odd type.
    """
    ordered = _ordered(tensors)
    with nullcontext() if ranks.index else path.open("wb") as file:
        if file is not None:
            file.write(_header(ordered))
        for tensor in ordered.values():
            own = tensor.detach()
            whole = own.full_tensor() if isinstance(own, DTensor) else own
            if file is not None:
                file.write(whole.cpu().reshape(-1).view(torch.uint8).numpy().data)


def _ordered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    kinds = [*_NAMES]
    return dict(sorted(tensors.items(), key=lambda item: (kinds.index(item[1].dtype), item[0])))


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
