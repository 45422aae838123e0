"""Rows of a pass, padded or packed.

Packed rows follow one another in one long row, without padding. Each token attends only to its own row. A beginning
that a row shares with the row before it is computed once. For example, the rows `a b c` and `a b d` are packed as
`a b c d`: `d` attends to the `a b` of the first row.

transformers calls attention functions by name. A model uses the function of this module, by its name, while it is given
packed rows. Otherwise it uses its own function, so it samples as it always does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

_NAME = "agentloop_rows"
_WIDEST = 256
"""Largest width of a head that flash-attention's kernels take, in multiples of 8."""


@dataclass(frozen=True, eq=False)
class PackedRows:
    """The places of the rows among the N tokens of a packed pass."""

    new: list[int]
    """Number of each row's tokens that it does not share with the row before it; at least one."""
    whole: list[int]
    """Number of all tokens of each row."""
    places: Tensor | None
    """[sum of whole]: the places of each row's tokens among the N, row after row; None: the N in their order."""
    new_bounds: Tensor
    """[B + 1] int32: where each row's new tokens begin, and where the last ones end."""
    whole_bounds: Tensor


@dataclass(frozen=True)
class Laid:
    """The inputs of a model's call, and the place of each token in the result."""

    inputs: dict[str, Any]
    places: Tensor
    """[B, T]: the place of each real token among all positions."""


def padded(token_ids: Tensor) -> Laid:
    """The padded rows [B, T] as they are. Padding is on the right, so causal attention keeps it out of every result."""
    places = torch.arange(token_ids.numel(), device=token_ids.device).view_as(token_ids)
    return Laid({"input_ids": token_ids}, places)


def packed(token_ids: Tensor, attention_mask: Tensor) -> Laid:
    """The real tokens alone, [1, N]. A beginning that a row shares with the row before it is left out."""
    lengths = attention_mask.sum(dim=1)
    shared = torch.zeros_like(lengths)
    alike = (token_ids[1:] == token_ids[:-1]) & attention_mask[1:] & attention_mask[:-1]
    shared[1:] = alike.long().cumprod(dim=1).sum(dim=1)
    shared = torch.minimum(shared, lengths - 1)  # each row has a token of its own
    columns = torch.arange(token_ids.shape[1], device=token_ids.device)
    new = attention_mask & (columns >= shared[:, None])
    own = new.flatten().cumsum(0).view_as(token_ids) - 1
    # A shared token is where the nearest earlier row has computed it.
    places = torch.where(new, own, 0).cummax(dim=0).values
    inputs = {"input_ids": token_ids[new][None], "position_ids": columns.expand_as(new)[new][None]}
    counts, ends = torch.stack([lengths - shared, lengths]), torch.zeros(2, len(lengths) + 1, dtype=torch.int32)
    bounds = ends.to(lengths.device)
    bounds[:, 1:] = counts.cumsum(dim=1)
    each, whole = counts.tolist()
    rows = PackedRows(each, whole, places[attention_mask] if sum(each) < sum(whole) else None, *bounds)
    return Laid({**inputs, "rows": rows}, places)


def knows_rows(backbone: nn.Module) -> bool:
    """Whether this module's attention can replace the model's own: that must be full, with plain scores and a mask."""
    if not isinstance(backbone, PreTrainedModel) or getattr(backbone, "_is_stateful", False):
        return False
    config = backbone.config
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    full = window is None if kinds is None else all(kind == "full_attention" for kind in kinds)
    known = backbone._supports_attention_backend and config._attn_implementation == "sdpa"
    return bool(full and known and config is config.get_text_config())


@cache
def has_flash(device: torch.device) -> bool:
    """Whether torch's flash-attention takes rows of any lengths there, as from torch 2.12 and Ampere on."""
    new = device.type == "cuda" and torch.version.hip is None and "enable_gqa" in signature(varlen_attn).parameters
    return new and torch.cuda.get_device_capability(device)[0] >= 8


@contextmanager
def attention_within(rows: PackedRows | None, backbone: nn.Module) -> Iterator[None]:
    """Let the backbone attend within the packed rows; None leaves it its own attention."""
    if rows is None:
        yield
        return
    config: Any = backbone.config
    own = config._attn_implementation
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = own


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    rows: PackedRows,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within rows: [1, H, N, D] in, [1, N, H, D] out. Keys and values may have fewer heads."""
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    # Rotary angles are float32 under autocast too.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if rows.places is not None:
        key, value = (states.index_select(0, rows.places) for states in (key, value))
    width = value.shape[-1]
    flash = has_flash(value.device) and value.dtype.itemsize == 2 and width <= _WIDEST and width % 8 == 0
    if flash and query.shape[-1] == width:
        bounds, longest = (rows.new_bounds, rows.whole_bounds), (max(rows.new), max(rows.whole))
        # The window's right end makes it causal, with the last new token at the row's end.
        attend: Any = varlen_attn  # whose result depends on what is asked for
        found = attend(query, key, value, *bounds, *longest, scale=scaling, window_size=(-1, 0), enable_gqa=True)
    else:
        found = _row_by_row(query, key, value, rows, scaling)
    return found[None], None


def _row_by_row(query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scaling: float | None) -> Tensor:
    """Attention of one row after another, for float32 and for CPUs."""
    found = []
    each = zip(query.split(rows.new), key.split(rows.whole), value.split(rows.whole), strict=True)
    for new, keys, values in each:
        shared = len(keys) - len(new)
        if (
            new.is_cuda and keys.shape[1] < new.shape[1]
        ):  # with fewer heads, only the kernel that keeps all scores is left
            keys, values = (states.repeat_interleave(new.shape[1] // keys.shape[1], dim=1) for states in (keys, values))
        states = scaled_dot_product_attention(
            new.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=new.new_ones((len(new), len(keys)), dtype=torch.bool).tril(shared) if shared else None,
            is_causal=shared == 0,
            scale=scaling,
            enable_gqa=True,
        )
        found.append(states[0].transpose(0, 1))
    return torch.cat(found)


AttentionInterface.register(_NAME, _attend)
