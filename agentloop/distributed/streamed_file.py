"""A safetensors file of tensors that ranks hold in parts, written piece by piece: no rank ever has a whole one.

safetensors itself writes only what is whole in memory: see docs/decisions/0013-streamed-weights.md.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentloop.distributed.ranks import Ranks

PIECE_BYTES = 32 * 1024**2
"""Most that is on its way from one rank to another."""
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
    if ranks.index:
        for tensor in ordered.values():
            for _ in _pieces(tensor, ranks):
                pass
        return
    with path.open("wb") as file:
        file.write(_header(ordered))
        for tensor in ordered.values():
            for piece in _pieces(tensor, ranks):
                file.write(piece.cpu().view(torch.uint8).numpy().data)


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


def _pieces(tensor: Tensor, ranks: Ranks) -> Iterator[Tensor]:
    """On rank 0 the values of the whole tensor, in order; any other rank sends its own and has nothing of the rest."""
    tensor = tensor.detach()
    most = PIECE_BYTES // tensor.element_size()
    own = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).reshape(-1)
    length = torch.tensor([len(own)], device=own.device)
    lengths = ranks.gather(length).tolist() if isinstance(tensor, DTensor) else [len(own)]
    for owner, length in enumerate(lengths):
        for begin in range(0, length, most):
            if owner == ranks.index:
                piece = own[begin : begin + most]
            elif ranks.index == 0:
                piece = own.new_empty(min(most, length - begin))
            else:
                continue
            yield ranks.send_first(piece, owner)
