"""How a pass over a model is made: in which types it has its weights and multiplies, what it keeps, compiled or not."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, arange, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentloop.config.sections.model import ComputeSection
from agentloop.errors import UserError


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Hooks around it, and what shards it, stay."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def on_its_device(compute: ComputeSection, model: PreTrainedModel) -> ComputeSection:
    """The settings with `autocast: auto` decided by where the model's weights are, and by their type."""
    if compute.autocast != "auto":
        return compute
    quick = model.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    chosen = "bfloat16" if quick and model.dtype == torch.float32 else "none"
    return compute.model_copy(update={"autocast": chosen})


def autocast(device: torch.device, compute: ComputeSection) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=compute.autocast == "bfloat16")


class Passes:
    """How one backbone is run, as the configuration's `compute` says."""

    def __init__(self, backbone: nn.Module, device: torch.device, compute: ComputeSection) -> None:
        self._backbone, self._device, self._compute = backbone, device, compute
        self._compiled = _compiled(backbone, device) if compute.compile else None
        self._recomputed: list[tuple[nn.Module, Callable[..., Any]]] = []
        if compute.gradient_checkpointing:
            layers = [module for module in backbone.modules() if isinstance(module, GradientCheckpointingLayer)]
            # transformers' own switch acts in training mode alone, which has dropout.
            self._recomputed = [(layer, _recomputed(layer.forward)) for layer in layers]
            if not layers:
                raise UserError(
                    f"compute.gradient_checkpointing must be false for a model without layers of the kind that can be "
                    f"made again, got true with {type(backbone).__name__}. Take it out."
                )

    @contextmanager
    def open(self) -> Iterator[None]:
        """While the model is called; backward may follow outside."""
        with ExitStack() as stack:
            stack.enter_context(autocast(self._device, self._compute))
            if self._compiled is not None:
                stack.enter_context(forward_replaced(self._backbone, self._compiled))
            if torch.is_grad_enabled():
                for layer, forward in self._recomputed:
                    stack.enter_context(forward_replaced(layer, forward))
            yield


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


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    # Nothing is random in evaluation mode.
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)


def _compiled(backbone: nn.Module, device: torch.device) -> Callable[..., Any]:
    missing = _missing_compiler(device)
    if missing is not None:
        raise UserError(f"compute.compile must be false where there is no {missing}, got true. Install it.")
    compiled: Callable[..., Any] = torch.compile(backbone.forward, dynamic=True)
    return compiled


def _missing_compiler(device: torch.device) -> str | None:
    if device.type == "cpu":
        return None if shutil.which(os.environ.get("CXX", "g++")) else "C++ compiler"
    return None if importlib.util.find_spec("triton") else "triton"


@dataclass(frozen=True)
class Laid:
    """Tokens as a model takes them, and where to find each row in what it returns."""

    inputs: dict[str, Tensor]
    starts: Tensor
    """[B]: where each row begins among all positions, rows one behind another."""


def padded(token_ids: Tensor) -> Laid:
    """[B, T] as it is; padding stands on the right, where causal attention alone keeps it out of every result."""
    return Laid({"input_ids": token_ids}, arange(len(token_ids), device=token_ids.device) * token_ids.shape[1])


def packed(token_ids: Tensor, attention_mask: Tensor) -> Laid:
    """[1, N] real tokens alone. Positions that begin again at 0 tell the model where rows begin.

    Hugging Face models make a block-diagonal attention mask of them, and flash-attention kernels need none: a token
    sees its own row. A model that takes no notice of positions mixes rows up; `check_scoring` finds that out.
    """
    positions = (attention_mask.long().cumsum(dim=1) - 1)[attention_mask]
    lengths = attention_mask.sum(dim=1)
    inputs = {"input_ids": token_ids[attention_mask][None], "position_ids": positions[None]}
    return Laid(inputs, lengths.cumsum(0) - lengths)
