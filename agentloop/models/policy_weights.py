"""A policy's weights, whole or sharded over ranks: they are written to files, and score rows of tokens.

If the policy is sharded, every rank makes the same call. Rank 0 gathers the weights in the CPU's memory and writes
them: the files are byte for byte those of a whole policy.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from agentloop.distributed.ranks import ALONE, Ranks
from agentloop.models.backbone_passes import cast_weights
from agentloop.models.loading import has_adapters, muted_libraries


class RowScores(NamedTuple):
    """A policy's log-probs, in nats, of each token of a row but the first, at temperature 1, and of next tokens."""

    log_probs: tuple[float, ...]
    rounding: tuple[float, ...]
    """How much these change when the policy multiplies in the type that its weights are rounded to."""
    next_ids: tuple[int, ...]
    """The likeliest next tokens, the likeliest first."""
    next_log_probs: tuple[float, ...]
    next_rounding: tuple[float, ...]


def shard(model: PreTrainedModel) -> None:
    """Shard every weight over the ranks (FSDP2, Zhao et al. 2023, arXiv 2304.11277), on the model's own device.

    Each layer is sharded by itself, then embeddings and head unless they are tied, then the rest. Gradients become sums
    over ranks, not means: a token's weight is its share in the whole step, on every rank.
    """
    # Without a mesh, weights would go to GPUs wherever there are any.
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
            # Without this, a divide factor needs a kind of sum that only NCCL has.
            module.set_force_sum_reduction_for_comms(True)


class PolicyWeights:
    """The weights of `model`, which is sharded where there are several `ranks`."""

    def __init__(self, model: PreTrainedModel, ranks: Ranks = ALONE) -> None:
        self.model, self._ranks = model, ranks

    @property
    def kind(self) -> Literal["full", "lora"]:
        return "lora" if has_adapters(self.model) else "full"

    @property
    def tied_head(self) -> str | None:
        """The name of the head's weight if it is tied to the embeddings; None if the head has its own weight."""
        model: Any = self.model
        head = model.get_output_embeddings()
        if head.weight is not model.get_input_embeddings().weight:
            return None
        module = next(path for path, module in model.named_modules() if module is head)
        return f"{module}.weight"

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder, byte for byte as `save_pretrained` does."""
        self._sort_adapted()
        whole = self._gathered(self.model.state_dict(keep_vars=True)) if self._ranks.several else None
        if self._ranks.index == 0:
            with muted_libraries():
                self.model.save_pretrained(folder, state_dict=whole)

    @property
    def bytes_of_files(self) -> int:
        """Bytes of the weights that `save` writes: only adapters, or all weights, tied ones once."""
        return sum(each.nbytes for each in self.model.parameters() if each.requires_grad or self.kind == "full")

    def save_head(self, file: Path, name: str) -> None:
        """Write the head's weight alone, under this name."""
        model: Any = self.model
        whole = self._gathered({name: model.get_output_embeddings().weight})
        if self._ranks.index == 0:
            save_file(whole, file, metadata={"format": "pt"})

    @torch.no_grad()
    def scores(
        self, rows: Sequence[Sequence[int]], *, number_type: str, temperature: float, most: int
    ) -> list[RowScores]:
        """Score each row with the weights rounded to `number_type` and products in float32.

        `temperature` applies to the `most` likely next tokens. Rows are scored one by one, because batches of different
        shapes round differently.
        """
        own = [rows[0] if row is None else row for row in self._ranks.share(rows)]
        found = [self._scored(row, getattr(torch, number_type), temperature, most) for row in own]
        return self._ranks.gather_shared(found)[: len(rows)]

    @torch.no_grad()
    def copy_to(self, copy: nn.Module | None) -> None:
        """Copy trainable weights, whole and one after another, into the `copy` of the rank that has one."""
        copies: Mapping[str, Tensor] = {} if copy is None else dict(copy.named_parameters())
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else cast(Tensor, parameter)
            if copy is not None:
                copies[name].copy_(whole)

    def _scored(self, row: Sequence[int], dtype: torch.dtype, temperature: float, most: int) -> RowScores:
        exact = self._logits(row, dtype, torch.float32)
        rounded = exact if dtype == torch.float32 else self._logits(row, dtype, dtype)
        given = torch.tensor(row[1:], device=exact.device)[:, None]
        scored, moved = (torch.log_softmax(logits[:-1], -1).gather(1, given)[:, 0] for logits in (exact, rounded))
        following, turned = (torch.log_softmax(logits[-1] / temperature, -1) for logits in (exact, rounded))
        ids = following.topk(min(most, len(following))).indices
        nexts = _rounded(following[ids]), _rounded((turned - following)[ids])
        return RowScores(_rounded(scored), _rounded(moved - scored), tuple(ids.tolist()), *nexts)

    def _logits(self, row: Sequence[int], dtype: torch.dtype, products: torch.dtype) -> Tensor:
        """[tokens, vocabulary] float32."""
        model: Any = self.model
        with cast_weights(model, dtype, products=products):
            logits: Tensor = model(torch.tensor([row], device=model.device)).logits[0].float()
        if isinstance(model, FSDPModule):
            # A pass without gradient leaves the outermost weights whole, and whole ones are never trained.
            model.reshard()
        return logits

    def _sort_adapted(self) -> None:
        """Sort the names of adapted layers: PEFT has them in a set, whose order differs between processes."""
        model: Any = self.model
        for adapter in model.peft_config.values() if has_adapters(self.model) else ():
            if isinstance(adapter.target_modules, set):
                adapter.target_modules = sorted(adapter.target_modules)

    def _gathered(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Make the parts whole on rank 0, in the CPU's memory; of a policy with adapters, only these. Tied tensors stay
        one."""
        whole: dict[int, Tensor] = {}
        written = {name: part for name, part in parts.items() if part.requires_grad or self.kind == "full"}
        for part in {id(part): part for part in written.values()}.values():
            own = part.detach()
            found = own.full_tensor() if isinstance(own, DTensor) else own
            if self._ranks.index == 0:
                whole[id(part)] = found.cpu()
        return {name: whole[id(part)] for name, part in written.items() if id(part) in whole}


def _rounded(values: Tensor) -> tuple[float, ...]:
    """Round each value to a millionth of a nat, because scores are stored as text."""
    return tuple(round(value, 6) for value in values.tolist())


def named_as_in_files(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a model's state that its files hold, by their names there. A tied tensor is there once."""
    saved = {name: t for name, t in tensors.items() if name not in (model._keys_to_ignore_on_save or ())}
    stored: dict[str, Tensor] = revert_weight_conversion(model, remove_tied_weights_from_state_dict(saved, model))
    return stored
