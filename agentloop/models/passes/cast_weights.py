"""Weights in another type while a model is called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


@contextmanager
def cast_weights(model: nn.Module, dtype: torch.dtype, *, products: torch.dtype) -> Iterator[None]:
    """Within, the model has its weights rounded to `dtype`, and multiplies in `products`. For passes without gradient.

    One decoder layer at a time has a copy, as do embeddings and head while they run. Weights that are sharded are whole
    in that moment, and are put back before what has gathered them takes its own.
    """
    hooks, inside = [], set[nn.Module]()
    for module in model.modules():
        if module in inside:
            continue
        parts = [module]
        if isinstance(module, GradientCheckpointingLayer):
            # All of it: what is adapted looks at the types of its parts before it calls them.
            parts = list(module.modules())
            inside.update(parts)
        if any(part._parameters for part in parts):
            copies = _Copies(parts, dtype, products)
            hooks.append(module.register_forward_pre_hook(copies.enter))
            hooks.append(module.register_forward_hook(copies.leave, prepend=True, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Copies:
    """Stand in for the parameters of some modules, as long as these run."""

    def __init__(self, parts: list[nn.Module], dtype: torch.dtype, products: torch.dtype) -> None:
        self._parts, self._dtype, self._products = parts, dtype, products
        self._own: list[dict[str, nn.Parameter | None]] = []

    def enter(self, *_: Any) -> None:
        self._own = [dict(part._parameters) for part in self._parts]
        for part, own in zip(self._parts, self._own, strict=True):
            part._parameters.update({name: self._cast(weight) for name, weight in own.items()})

    def leave(self, *_: Any) -> None:
        for part, own in zip(self._parts, self._own, strict=False):
            part._parameters.update(own)
        self._own = []

    def _cast(self, weight: nn.Parameter | None) -> nn.Parameter | None:
        if weight is None or not weight.is_floating_point():
            return weight
        return nn.Parameter(weight.detach().to(self._dtype).to(self._products), requires_grad=False)
