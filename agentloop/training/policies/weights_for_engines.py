"""A policy's weights in the forms that engines take: a published folder, or handles of the memory they are in."""

import base64
import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from agentloop.engines.publish.published_policy import RECORD, Probe, PublishedPolicy, folder_hash, read_published
from agentloop.models.policy_weights import PolicyWeights, named_as_in_files
from agentloop.runs.checkpoint import write_directory

_INDEX = "model.safetensors.index.json"
_WHOLE, _BODY, _HEAD = "model.safetensors", "model-body.safetensors", "model-head.safetensors"


def write_published(
    target: Path, weights: PolicyWeights, save_model: Callable[[Path], None], *, probe: Probe, run: str, version: int
) -> PublishedPolicy:
    """Make `target` a published policy, whole or not at all. `save_model` writes weights and tokenizer."""

    def fill(folder: Path) -> None:
        save_model(folder)
        if weights.kind == "full":
            untie_head(folder, weights)
        digest = folder_hash(folder)
        policy = PublishedPolicy(run=run, version=version, kind=weights.kind, sha256=digest, probe=probe)
        (folder / RECORD).write_text(policy.model_dump_json())

    write_directory(target, fill)
    return read_published(target)


def untie_head(folder: Path, weights: PolicyWeights) -> None:
    """Give the folder a separate head where the head is tied: an engine on a CPU packs a tied head at its start."""
    name = weights.tied_head
    if name is None:
        return
    if (folder / _INDEX).exists():
        index = json.loads((folder / _INDEX).read_text())
    else:
        # Under its old name, the file would be read without the others.
        (folder / _WHOLE).rename(folder / _BODY)
        with safe_open(folder / _BODY, framework="pt") as body:
            index = {"metadata": {}, "weight_map": dict.fromkeys(body.keys(), _BODY)}
    weights.save_head(folder / _HEAD, name)
    index["weight_map"][name] = _HEAD
    (folder / _INDEX).write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = False
    if "tie_word_embeddings" in config.get("text_config", {}):
        config["text_config"]["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config, indent=2))


@contextmanager
def shared_weights(weights: PolicyWeights) -> Iterator[dict[str, Any]]:
    """Handles of all weights for one update by a vLLM on the same GPU, which reads them where they are (CUDA IPC).

    The handles are valid within the block, and weights have the names of files. vLLM calls this weight transfer with
    the backend "ipc", not packed.
    """
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors_of_files(weights).items()}
    torch.cuda.synchronize()  # another process reads them now
    yield wire_update(tensors, [_handle(tensor) for tensor in tensors.values()])
    torch.cuda.ipc_collect()


def tensors_of_files(weights: PolicyWeights) -> dict[str, Tensor]:
    """The tensors of published files, by their names there."""
    model: Any = weights.model
    stored, head = named_as_in_files(model, model.state_dict()), weights.tied_head
    return stored if head is None else {**stored, head: model.get_output_embeddings().weight}


def wire_update(tensors: Mapping[str, Tensor], handles: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The body of a request to vLLM's /update_weights, from tensors and their handles by device."""
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(list(handles))).decode(),
    }


def _handle(tensor: Tensor) -> dict[str, Any]:
    _, arguments = reduce_tensor(tensor)
    return {str(torch.cuda.get_device_properties(tensor.device).uuid): arguments}
