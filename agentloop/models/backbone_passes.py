"""Runs the body of a model: in which type it multiplies, and which activations it keeps for backward."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from timeit import timeit
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentloop.config.sections.model import ComputeSection
from agentloop.errors import UserError
from agentloop.models.row_attention import Laid, attention_within, knows_rows, packed, padded

_WIDEST, _TRIES = 256, 7
"""The size of the products that are timed, and how often each is: far below a second in the slowest type."""
_CLEARLY = 1.4
"""The factor from which on a type is called quicker than another."""


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's forward within the block. Its hooks, and the code that shards it, stay."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def on_its_device(compute: ComputeSection, model: PreTrainedModel) -> ComputeSection:
    """The settings with `autocast: auto` decided by the device and the type of the model's weights."""
    if compute.autocast != "auto":
        return compute
    quick = model.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    chosen = "bfloat16" if quick and model.dtype == torch.float32 else "none"
    return compute.model_copy(update={"autocast": chosen})


def times_as_long(dtype: torch.dtype, *, width: int = _WIDEST) -> float:
    """Measure how many times as long as in float32 a linear layer's products take in this type on this CPU.

    They are timed on one thread: several would wait for each other on a busy machine. The smallest of several times
    counts, because other programs only add to a time.
    """
    size, threads = min(width, _WIDEST), torch.get_num_threads()
    operands = [{"x": torch.ones(size, size, dtype=each)} for each in (torch.float32, dtype)]
    torch.set_num_threads(1)
    # The products of a forward and a backward pass.
    tries = [[timeit("x @ x.T; x @ x; x.T @ x", globals=one, number=1) for one in operands] for _ in range(_TRIES)]
    torch.set_num_threads(threads)
    return min(other for _, other in tries) / min(plain for plain, _ in tries)


def describe_types(
    model: PreTrainedModel, compute: ComputeSection, *, measure: Callable[..., float] = times_as_long
) -> str:
    """Say in which types a model computes, and which setting is clearly quicker if this is a CPU and there is one."""
    weights = str(model.dtype).removeprefix("torch.")
    products = weights if compute.autocast == "none" else compute.autocast
    said = f"computing on {model.device.type}: weights in {weights}, products in {products}"
    if model.device.type != "cpu":
        return said
    half = torch.bfloat16 if products == "float32" else getattr(torch, products)
    times = measure(half, width=int(model.config.get_text_config().hidden_size))
    if products == "float32" and times * _CLEARLY <= 1:
        return f"{said}. Products in bfloat16 are {compared(times)} here: compute.autocast: bfloat16"
    if products != "float32" and times >= _CLEARLY:
        setting = "model.dtype: float32" if weights == products else "compute.autocast: none"
        return f"{said}, which are {compared(times)} than in float32 here. Quicker: {setting}"
    return said


def compared(times: float) -> str:
    """Write 28.3 times as long as `about 28 times slower`, and half as long as `about 2 times quicker`."""
    return f"about {times:.2g} times slower" if times > 1 else f"about {1 / times:.2g} times quicker"


class Passes:
    """The way one backbone is run, by the configuration's `compute`."""

    def __init__(self, backbone: nn.Module, device: torch.device, compute: ComputeSection) -> None:
        self._backbone, self._device, self._compute = backbone, device, compute
        self.can_pack = knows_rows(backbone)
        layers = [module for module in backbone.modules() if isinstance(module, GradientCheckpointingLayer)]
        # transformers' own switch acts in training mode alone, which has dropout.
        self._recomputed = [(layer, _recomputed(layer.forward, backbone)) for layer in layers]
        self.can_recompute = bool(layers)
        self.recomputes = compute.gradient_checkpointing is True
        """Whether backward computes the activations of layers again."""
        if self.recomputes and not layers:
            raise UserError(
                f"compute.gradient_checkpointing must be false for a model without layers of the kind that can be "
                f"made again, got true with {type(backbone).__name__}. Take it out."
            )

    def laid(self, token_ids: Tensor, attention_mask: Tensor, *, packs: bool) -> Laid:
        return packed(token_ids, attention_mask) if packs else padded(token_ids)

    @contextmanager
    def open(self, laid: Laid) -> Iterator[None]:
        """Set up autocast, attention and recomputation while the model is called. Backward may follow outside."""
        with ExitStack() as stack:
            enabled = self._compute.autocast == "bfloat16"
            stack.enter_context(torch.autocast(self._device.type, torch.bfloat16, enabled=enabled))
            stack.enter_context(attention_within(laid.inputs.get("rows"), self._backbone))
            if self.recomputes and torch.is_grad_enabled():
                for layer, forward in self._recomputed:
                    stack.enter_context(forward_replaced(layer, forward))
            yield


def _recomputed(forward: Callable[..., Any], backbone: nn.Module) -> Callable[..., Any]:
    def as_before(*arguments: Any, **named: Any) -> Any:
        with attention_within(named.get("rows"), backbone):  # backward runs outside of the pass
            return forward(*arguments, **named)

    # Nothing is random in evaluation mode.
    return partial(checkpoint, as_before, use_reentrant=False, preserve_rng_state=False)


@contextmanager
def cast_weights(model: nn.Module, dtype: torch.dtype, *, products: torch.dtype) -> Iterator[None]:
    """Round the model's weights to `dtype` and multiply in `products`, within the block and without gradient.

    One decoder layer at a time has rounded copies, and so have embeddings and head while they run. Sharded weights are
    whole at that moment. The originals are put back before FSDP's own hooks shard them again.
    """
    hooks, inside = [], set[nn.Module]()
    for module in model.modules():
        if module in inside:
            continue
        parts = [module]
        if isinstance(module, GradientCheckpointingLayer):
            # The whole layer: adapted parts look at the types of their own parts before they call them.
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
    """Rounded copies that replace the parameters of some modules while these modules run."""

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
