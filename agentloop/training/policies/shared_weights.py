"""Weights on a GPU, for a vLLM that has the same one: it reads them where they are (CUDA IPC), and no file is made.

It is vLLM's weight transfer with the backend "ipc", not packed: names as in files, and a handle of each tensor.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from agentloop.models.policy_weights import PolicyWeights


@contextmanager
def shared_weights(weights: PolicyWeights) -> Iterator[dict[str, Any]]:
    """Handles of all weights, which are whole on this GPU, for one update; they stand for them within the block."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors_of_files(weights).items()}
    torch.cuda.synchronize()  # another process looks at them now
    yield wire_update(tensors, [_handle(tensor) for tensor in tensors.values()])
    torch.cuda.ipc_collect()


def tensors_of_files(weights: PolicyWeights) -> dict[str, Tensor]:
    """The tensors that published files would have, by their names there."""
    model: Any = weights.model
    parts = model.state_dict()
    for name in model._keys_to_ignore_on_save or ():
        parts.pop(name, None)
    stored: dict[str, Tensor] = revert_weight_conversion(model, remove_tied_weights_from_state_dict(parts, model))
    head = weights.tied_head
    return stored if head is None else {**stored, head: model.get_output_embeddings().weight}


def wire_update(tensors: Mapping[str, Tensor], handles: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What vLLM's /update_weights takes, of tensors and a handle of each, by the device that it is on."""
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(list(handles))).decode(),
    }


def _handle(tensor: Tensor) -> dict[str, Any]:
    _, arguments = reduce_tensor(tensor)
    return {str(torch.cuda.get_device_properties(tensor.device).uuid): arguments}
