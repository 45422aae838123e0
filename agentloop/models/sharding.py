"""One policy over several ranks: FSDP2 (Zhao et al. 2023, arXiv 2304.11277), a part of every weight on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def shard(model: PreTrainedModel) -> None:
    """Layer by layer, then embeddings and head, each alone unless they are tied and must stay one; then the rest.

    It stays on its device. Gradients become sums over ranks, not means: what a token weighs is its share in the whole
    step on every rank.
    """
    # Without one, weights would go to the GPUs wherever there are any.
    mesh = init_device_mesh(model.device.type, (dist.get_world_size(),))
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            fully_shard(layer, mesh=mesh)
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    if ends[0].weight is not ends[1].weight:
        for end in ends:
            fully_shard(end, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Without it a factor is a kind of sum that only NCCL has.
            module.set_force_sum_reduction_for_comms(True)
            if model.device.type == "cpu":
                module.set_custom_all_gather(cast(Any, _InPlace()))


class _InPlace:
    """An all-gather of each rank's part by itself, for gloo, whose own makes another copy of all that it gathers.

    What it returns is waited for, and FSDP lets go of the gathered weights as soon as it has taken them; of others it
    keeps those of one layer until it has the next one's.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        parts = output_tensor.chunk(group.size())
        parts[group.rank()].copy_(input_tensor)
        works = [dist.broadcast(part, group=group, group_src=owner, async_op=True) for owner, part in enumerate(parts)]
        for work in works[:-1]:
            work.wait()
        last: dist.Work = works[-1]
        return last


@torch.no_grad()
def gather(model: nn.Module, into: nn.Module | None) -> None:
    """Whole trainable weights, one after another. Every rank takes part; `into` has a copy on the rank that wants one.

    A module that is not sharded is copied as it is.
    """
    copies: Mapping[str, Tensor] = {} if into is None else dict(into.named_parameters())
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else cast(Tensor, parameter)
        if into is not None:
            copies[name].copy_(whole)
