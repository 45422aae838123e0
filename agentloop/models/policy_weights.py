"""A policy's weights, whole or sharded over ranks: they are written to files, and score rows of tokens.

If the policy is sharded, every rank makes the same call and rank 0 writes. No rank ever has a whole copy. The files are
byte for byte those of a whole policy.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from agentloop.distributed.ranks import ALONE, Ranks
from agentloop.errors import UserError
from agentloop.models.backbone_passes import cast_weights
from agentloop.models.loading import has_adapters, muted_libraries

LARGEST_FILE = 50 * 10**9
"""Bytes of the largest file; further weights go into another one. transformers has the same default."""
_ADAPTER_PREFIX = "base_model.model."
"""Prefix of the names in PEFT's files."""
# Types in the order in which safetensors writes their tensors.
_TYPE_NAMES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


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

    def __init__(self, model: PreTrainedModel, ranks: Ranks = ALONE, *, largest_file: int = LARGEST_FILE) -> None:
        self.model, self._ranks, self._largest_file = model, ranks, largest_file

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
        with muted_libraries():
            if not self._ranks.several:
                self.model.save_pretrained(folder, max_shard_size=self._largest_file)
                return
            if self._ranks.index == 0:
                self.model.save_pretrained(folder, state_dict={})  # all but the weights
        self._save_parts(folder)

    @property
    def bytes_of_files(self) -> int:
        """Bytes of the weights that `save` writes: only adapters, or all weights, tied ones once."""
        return sum(each.nbytes for each in self.model.parameters() if each.requires_grad or self.kind == "full")

    def save_head(self, file: Path, name: str) -> None:
        """Write the head's weight alone, under this name."""
        model: Any = self.model
        stream_tensors(file, {name: model.get_output_embeddings().weight}, self._ranks)

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

    def _save_parts(self, folder: Path) -> None:
        if has_adapters(self.model):
            own = self.model.get_adapter_state_dict()
            kind, tensors = "adapter_model", {f"{_ADAPTER_PREFIX}{name}": tensor for name, tensor in own.items()}
        else:
            kind, tensors = "model", _stored(self.model)
        split = split_torch_state_dict_into_shards(
            _stand_ins(tensors), filename_pattern=f"{kind}{{suffix}}.safetensors", max_shard_size=self._largest_file
        )
        for file, names in split.filename_to_tensors.items():
            stream_tensors(folder / file, {name: tensors[name] for name in names}, self._ranks)
        if split.is_sharded and self._ranks.index == 0:
            metadata = {"total_parameters": self.model.num_parameters(), **split.metadata}
            index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (folder / f"{kind}.safetensors.index.json").write_text(text, encoding="utf-8")


def _rounded(values: Tensor) -> tuple[float, ...]:
    """Round each value to a millionth of a nat, because scores are stored as text."""
    return tuple(round(value, 6) for value in values.tolist())


def _stored(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of a file by their names in it. A tied tensor is there once.

    transformers names stand-ins without memory, and the tensors are found by these. Raises UserError if a file has
    weights in another form.
    """
    parts = model.state_dict()
    places = _stand_ins(parts)
    own = {id(place): name for name, place in places.items()}
    stored = named_as_in_files(model, places)
    for name, place in stored.items():
        if id(place) not in own:
            raise UserError(
                f"model.path must be a model whose files hold its weights as they are on several ranks with "
                f"rollout.engine: vllm, got {type(model).__name__}, which makes {name} of others. Use one rank."
            )
    return {name: parts[own[id(place)]] for name, place in stored.items()}


def named_as_in_files(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a model's state that its files hold, by their names there. A tied tensor is there once."""
    saved = {name: t for name, t in tensors.items() if name not in (model._keys_to_ignore_on_save or ())}
    stored: dict[str, Tensor] = revert_weight_conversion(model, remove_tied_weights_from_state_dict(saved, model))
    return stored


def _stand_ins(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the same shapes and types that take no memory."""
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}


def stream_tensors(path: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Write the file that safetensors' `save_file` would write for the whole tensors, one tensor at a time.

    Every rank calls this with the same names, and rank 0 writes. A sharded tensor is gathered from all ranks, any other
    is rank 0's. safetensors itself needs all tensors in memory: see docs/decisions/0013-streamed-weights.md. Raises
    ValueError for a type that is not known.
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
    kinds = [*_TYPE_NAMES]
    return dict(sorted(tensors.items(), key=lambda item: (kinds.index(item[1].dtype), item[0])))


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _TYPE_NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
