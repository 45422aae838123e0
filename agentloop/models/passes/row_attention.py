"""Attention of packed rows: a token sees its own row, and what rows begin with alike is computed once.

transformers calls attention functions by name. A model runs under the name of this one while it is given packed rows,
and under its own else: it samples as it always does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from agentloop.models.passes.row_layout import PackedRows

_NAME = "agentloop_rows"
_WIDEST = 256
"""Numbers of a head that flash-attention's kernels take; a multiple of 8."""


def knows_rows(backbone: nn.Module) -> bool:
    """True: this attention can stand for the model's own, which is full and has no part in its scores but the mask."""
    if not isinstance(backbone, PreTrainedModel) or getattr(backbone, "_is_stateful", False):
        return False
    config = backbone.config
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        full = getattr(config, "sliding_window", None) is None
    else:
        full = all(kind == "full_attention" for kind in kinds)
    known = backbone._supports_attention_backend and config._attn_implementation == "sdpa"
    return bool(full and known and config is config.get_text_config())


@cache
def has_flash(device: torch.device) -> bool:
    """True: torch's flash-attention takes rows of any lengths there; torch 2.12 and Ampere are the first with it."""
    new = device.type == "cuda" and torch.version.hip is None and "enable_gqa" in signature(varlen_attn).parameters
    return new and torch.cuda.get_device_capability(device)[0] >= 8


@contextmanager
def attention_within(rows: PackedRows | None, backbone: nn.Module) -> Iterator[None]:
    """The backbone's attention is that of the rows; None: its own."""
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
    """Causal attention within rows, [1, N, H, D] of [1, H, N, D]; keys and values may have fewer heads."""
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
    """For float32, and on CPUs."""
    found = []
    each = zip(query.split(rows.new), key.split(rows.whole), value.split(rows.whole), strict=True)
    for new, keys, values in each:
        shared = len(keys) - len(new)
        if new.is_cuda and keys.shape[1] < new.shape[1]:  # with fewer heads, the kernel that keeps all scores is left
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
