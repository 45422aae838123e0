"""Makes updated weights the sampling policy, and keeps snapshots with which stored log-probs can be checked."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from agentloop.engines.local.local_generator import LocalGenerator
from agentloop.engines.remote.engine_client import RemoteEngine
from agentloop.models.loading import LoadedModel
from agentloop.models.policy_weights import PolicyWeights
from agentloop.runs.checkpoint import prune, write_directory
from agentloop.runs.run_folder import RunFolder
from replay.records import PolicyRecord, Trajectory
from replay.store import ReplayStore

# The files besides the weights that a folder needs to be loaded by `model.path`.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "added_tokens.json",
)


class Publisher:
    """Publishes a policy that is sampled in this process. Version 0 is the policy that the run starts with."""

    least_folders = 0
    """Number of published folders that stay, even if `checkpoint.keep_policies` is lower."""
    seconds: Mapping[str, float] = {}
    """Seconds of the parts of the last publish, by the names of their metrics."""

    def __init__(
        self,
        loaded: LoadedModel,
        generator: LocalGenerator | RemoteEngine,
        store: ReplayStore,
        *,
        folder: RunFolder,
        weights: PolicyWeights,
        gather: Callable[[], None] | None = None,
    ) -> None:
        """`weights` of `loaded` may be sharded. `gather` copies trained weights into them."""
        self.generator, self._loaded, self._gather = generator, loaded, gather
        self._weights = weights
        self._store, self._folder = store, folder

    def remember(self, trajectories: Sequence[Trajectory]) -> None:
        """Score trajectories before an update, where engines will have to prove the new weights by them."""

    def sleep(self) -> bool:
        """Let engines sleep until the next publish. Returns whether one freed GPU memory. Raises EngineEnded."""
        return False

    def check(self) -> None:
        """Raises EngineEnded where the run's own engine has ended."""

    def resume(self, version: int) -> None:
        """Give engines the weights of this version, which a resume has loaded."""

    def publish(self, version: int) -> None:
        """Store the version of the present weights, snapshot them if configured, and sample from them from now on."""
        if self._gather is not None:
            self._gather()
        # The database comes first: it refuses a process whose run was taken over, which must not touch files.
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
