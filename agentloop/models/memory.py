"""Estimates of the memory that a pass and an update need, and whether it is there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from agentloop.config import RunConfig
from agentloop.errors import UserError, one_line
from agentloop.models.actor import Actor, KeptForBackward

_USABLE = 0.9
"""Share of the free memory that is planned with. The rest is for tensors within a layer, and for gaps."""
_FEW, _MORE = 64, 128
"""Tokens of the two passes that are measured."""


def kept_for_backward(actor: Actor) -> KeptForBackward:
    """Measure, with two small passes, the bytes that a pass keeps for its backward."""
    few, more = (_measure_kept(actor, tokens) for tokens in (_FEW, _MORE))
    per_token = (more - few) // (_MORE - _FEW)
    return KeptForBackward(few - _FEW * per_token, per_token)


@torch.enable_grad()
def _measure_kept(actor: Actor, tokens: int) -> int:
    """Bytes that autograd keeps for a row of so many tokens, without the weights themselves."""
    weights = {weight.untyped_storage().data_ptr() for weight in actor.model.parameters()}
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    there = torch.ones((1, tokens), dtype=torch.bool, device=actor.device)
    action = torch.arange(tokens, device=actor.device)[None] > 0
    with saved_tensors_hooks(note, lambda tensor: tensor):
        kept = actor.log_probs(there.long(), there, action, torch.ones(1, device=actor.device))
    del kept  # until here the noted tensors live, so no two of them share an address
    return sum(sizes.values())


def fits(kept: KeptForBackward, *, tokens: int, to_come: int, free: int) -> bool:
    """Whether passes of so many tokens can keep their activations; other things need `to_come` of the `free` bytes."""
    return kept.bytes_for(tokens) + to_come <= _USABLE * free


def choose_checkpointing(actor: Actor, config: RunConfig, *, to_come: int) -> str | None:
    """Let backward compute activations again if the largest passes can't keep them.

    `to_come` are the bytes of gradients and optimizer state that will be allocated. Returns the choice and its reason
    in words; None where there was nothing to choose.
    """
    if actor.compute.gradient_checkpointing != "auto" or actor.device.type != "cuda" or not actor.passes.can_recompute:
        return None
    kept = actor.kept_for_backward = actor.kept_for_backward or kept_for_backward(actor)
    free, tokens = free_memory(actor.device), max(config.batch.micro_batch_tokens, config.context.max_tokens)
    actor.passes.recomputes = not fits(kept, tokens=tokens, to_come=to_come, free=free)
    chosen = "made again in backward" if actor.passes.recomputes else "kept for backward"
    return (
        f"activations are {chosen}: passes of {tokens:,} tokens would keep {kept.bytes_for(tokens) / 1e9:.1f} GB, "
        f"gradients and optimizer take {to_come / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free "
        "(compute.gradient_checkpointing: auto)"
    )


def check_memory(actor: Actor, config: RunConfig, *, state: int, there: int) -> str:
    """Say how much of this machine's memory an update takes, for a policy on the CPU.

    `state` counts the optimizer's bytes, `there` all bytes of memory. Raises UserError if no pass fits.
    """
    weights = actor.model.parameters()
    held = state + sum(each.nbytes + 4 * each.numel() * each.requires_grad for each in weights)
    if held > there:
        raise UserError(
            f"model.path must be a model whose weights, gradients and optimizer fit into memory, got {in_gb(held)} "
            f"where there are {in_gb(there)}. Train adapters (lora.rank), or a smaller model."
        )
    kept = actor.kept_for_backward = actor.kept_for_backward or kept_for_backward(actor)
    tokens = max(config.batch.micro_batch_tokens, config.context.max_tokens)
    most = held + kept.bytes_for(tokens)
    low = " Too much: lower batch.micro_batch_tokens, or set compute.gradient_checkpointing: true." * (most > there)
    return (
        f"memory: up to {in_gb(most)} of {in_gb(there)} in an update (weights, gradients and optimizer "
        f"{in_gb(held)}, a pass of {tokens:,} tokens {in_gb(kept.bytes_for(tokens))}).{low}"
    )


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that this process can still use: free bytes, and bytes that torch has reserved."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def machine_memory() -> int:
    """Bytes of this machine's memory, or of a container's limit if that is lower."""
    limit, physical = Path("/sys/fs/cgroup/memory.max"), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    allowed = limit.read_text().strip() if limit.exists() else "max"
    return min(physical, int(allowed)) if allowed.isdecimal() else physical


def in_gb(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


@contextmanager
def memory_suffices(tokens: int) -> Iterator[None]:
    """Raises UserError if a pass within the block runs out of a GPU's memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"batch.micro_batch_tokens must leave a pass room in the GPU's memory, got {tokens} and {one_line(error)} "
            "Lower it, or set compute.gradient_checkpointing: true; a new run can have a lower context.max_tokens, or "
            "adapters (lora.rank)."
        ) from error
