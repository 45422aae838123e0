"""Make the updated weights the sampling policy, and keep a snapshot that stored log-probs can be checked against;
to an engine on the same GPU they go through its memory."""

import base64
import json
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from agentloop.engines.local.local_generator import LocalGenerator
from agentloop.engines.publish.published_policy import RECORD, Probe, PublishedPolicy, folder_hash, read_published
from agentloop.engines.remote.engine_client import RemoteEngine
from agentloop.models.loading import LoadedModel
from agentloop.models.policy_weights import PolicyWeights, named_as_in_files
from agentloop.runs.checkpoint import prune, write_directory
from agentloop.runs.run_folder import RunFolder
from replay.records import PolicyRecord, Trajectory
from replay.store import ReplayStore

# Everything besides the weights that makes a folder loadable by `model.path`.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "added_tokens.json",
)


class Publisher:
    """Counts publishes of a policy that is sampled in this process; version 0 is the one the run starts with."""

    least_folders = 0
    """Published folders that stay whatever `checkpoint.keep_policies` says."""
    seconds: Mapping[str, float] = {}
    """What the parts of the last publish took, by the names of their metrics."""

    def __init__(
        self,
        loaded: LoadedModel,
        generator: LocalGenerator | RemoteEngine,
        store: ReplayStore,
        *,
        folder: RunFolder,
        weights: PolicyWeights | None = None,
        gather: Callable[[], None] | None = None,
    ) -> None:
        """`weights` of `loaded` may be sharded (None: they are whole); `gather` brings trained ones into them."""
        self.generator, self._loaded, self._gather = generator, loaded, gather
        self._weights = weights or PolicyWeights(loaded.model)
        self._store, self._folder = store, folder

    def remember(self, trajectories: Sequence[Trajectory]) -> None:
        """Note what the policy gives these before it is updated, where engines will be asked about them."""

    def sleep(self) -> bool:
        """Let engines rest until the next publish: whether one made room on the GPU. Raises EngineEnded."""
        return False

    def check(self) -> None:
        """Raises EngineEnded where the run's own engine is gone."""

    def resume(self, version: int) -> None:
        """Hand over the weights of this version, which are in place again, where somebody else samples."""

    def publish(self, version: int) -> None:
        """Record the version whose weights are in place, snapshot it if asked, and sample from it from now on."""
        if self._gather is not None:
            self._gather()
        # The database first: it refuses a process whose run was taken over, which must not touch the other's files.
        record = self._record(version)
        self._store.add_policy(record)
        self._hand_over(record)
        kept = self._folder.config.checkpoint.keep_policies
        if kept != "all" and (most := max(self.least_folders, 0 if kept == "none" else kept)):
            prune(self._folder.policies, keep=most)

    def _hand_over(self, record: PolicyRecord) -> None:
        if record.checkpoint is not None:
            write_directory(self._folder.path / record.checkpoint, self.save_model)
        self.generator.published(record.version)

    def _record(self, version: int) -> PolicyRecord:
        kept = self._folder.config.checkpoint.keep_policies != "none"
        return PolicyRecord(
            run=self._folder.run_id,
            version=version,
            checkpoint=f"policies/{version:06d}" if kept else None,
            tokenizer_hash=self._loaded.codec.hash,
            template_hash=self._loaded.template.hash,
        )

    def save_model(self, target: Path) -> None:
        """Write a Hugging Face folder with the current weights and the run's tokenizer."""
        self._weights.save(target)
        for name in _TOKENIZER_FILES:
            source = self._folder.start / name
            if source.exists():
                shutil.copy2(source, target / name)


_INDEX = "model.safetensors.index.json"
_WHOLE, _BODY, _HEAD = "model.safetensors", "model-body.safetensors", "model-head.safetensors"


def write_published(
    target: Path, weights: PolicyWeights, save_model: Callable[[Path], None], *, probe: Probe, run: str, version: int
) -> PublishedPolicy:
    """Make `target` a published policy, whole or not at all; `save_model` writes weights and tokenizer into it."""

    def fill(folder: Path) -> None:
        save_model(folder)
        if weights.kind == "full":
            untie(folder, weights)
        digest = folder_hash(folder)
        policy = PublishedPolicy(run=run, version=version, kind=weights.kind, sha256=digest, probe=probe)
        (folder / RECORD).write_text(policy.model_dump_json())

    write_directory(target, fill)
    return read_published(target)


def untie(folder: Path, weights: PolicyWeights) -> None:
    """Give the folder a head of its own where it is tied: an engine on a CPU packs a tied one when it starts."""
    name = weights.tied_head
    if name is None:
        return
    if (folder / _INDEX).exists():
        index = json.loads((folder / _INDEX).read_text())
    else:
        # Under its old name the one file would be read alone.
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

    They stand for the weights, which are whole, within the block; names are as in files. It is vLLM's weight transfer
    with the backend "ipc", not packed.
    """
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors_of_files(weights).items()}
    torch.cuda.synchronize()  # another process looks at them now
    yield wire_update(tensors, [_handle(tensor) for tensor in tensors.values()])
    torch.cuda.ipc_collect()


def tensors_of_files(weights: PolicyWeights) -> dict[str, Tensor]:
    """The tensors that published files would have, by their names there."""
    model: Any = weights.model
    stored, head = named_as_in_files(model, model.state_dict()), weights.tied_head
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
