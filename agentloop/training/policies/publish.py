"""Make the updated weights the sampling policy, and keep a snapshot that stored log-probs can be checked against."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from agentloop.engines.local.local_generator import LocalGenerator
from agentloop.models.loading import LoadedModel
from agentloop.models.policy_weights import PolicyWeights
from agentloop.runs.checkpoint import prune, write_directory
from agentloop.runs.run_folder import RunFolder
from agentloop.training.policies.engine_publisher import EnginePublisher
from agentloop.training.policies.probe import Prober, probe_rows
from replay.records import PolicyRecord, Trajectory
from replay.store import ReplayStore

_FOR_ENGINES = 2
"""Published folders that stay: an engine that is started anew gets the newest."""
# Everything beside the weights that makes a folder loadable by `model.path`.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "added_tokens.json",
)


class Publisher:
    """Counts publishes; version 0 is the policy the run starts with."""

    def __init__(
        self,
        loaded: LoadedModel,
        sampler: LocalGenerator | EnginePublisher,
        store: ReplayStore,
        *,
        folder: RunFolder,
        weights: PolicyWeights | None = None,
        gather: Callable[[], None] | None = None,
    ) -> None:
        """`weights` are those of `loaded`, which may be sharded; None: they are whole. `gather` brings trained weights
        into them; None: they are the same."""
        self._loaded = loaded
        self._weights = weights or PolicyWeights(loaded.model)
        self._sampler = sampler
        self._store = store
        self._config = folder.config
        self._folder = folder
        self._run = folder.run_id
        self._gather = gather
        self._prober: Prober | None = None
        if isinstance(sampler, EnginePublisher):
            self._prober = Prober(self._weights, sampler.number_type, self._config.rollout.temperature)

    def remember(self, trajectories: Sequence[Trajectory]) -> None:
        """Before an update: engines will be asked about the last words of these, which the policy as it is knows."""
        if self._prober is not None:
            self._prober.remember(probe_rows(trajectories))

    def sleep(self) -> bool:
        """Nothing is sampled until the next publish. True: an engine has made room on the GPU meanwhile.

        Raises EngineEnded where the run's own engine is gone.
        """
        return isinstance(self._sampler, EnginePublisher) and self._sampler.sleep()

    def check(self) -> None:
        """Raises EngineEnded where the run's own engine is gone."""
        if isinstance(self._sampler, EnginePublisher):
            self._sampler.check()

    @property
    def seconds(self) -> dict[str, float]:
        """What the last publish to engines took, in parts, by the names of their metrics."""
        return dict(self._sampler.seconds) if isinstance(self._sampler, EnginePublisher) else {}

    def publish(self, version: int) -> None:
        """`version` is in place: record it, snapshot it if asked, and sample from it from now on."""
        if self._gather is not None:
            self._gather()
        # The database first: it refuses a process whose run was taken over, which must not touch the other's files.
        record = self._record(version)
        self._store.add_policy(record)
        if isinstance(self._sampler, EnginePublisher):
            self._publish_to(self._sampler, record)
        else:
            if self._config.checkpoint.keep_policies != "none":
                write_directory(self._folder.path / str(record.checkpoint), self.save_model)
            self._sampler.published(version)
        self._prune()

    def resume(self, version: int) -> None:
        """The weights of this version are in place again: engines elsewhere get them."""
        if isinstance(self._sampler, EnginePublisher):
            self._publish_to(self._sampler, self._record(version))

    def _record(self, version: int) -> PolicyRecord:
        kept = self._config.checkpoint.keep_policies != "none"
        return PolicyRecord(
            run=self._run,
            version=version,
            checkpoint=f"policies/{version:06d}" if kept else None,
            tokenizer_hash=self._loaded.codec.hash,
            template_hash=self._loaded.template.hash,
        )

    def _publish_to(self, engines: EnginePublisher, record: PolicyRecord) -> None:
        assert self._prober is not None
        tokenizer = self._loaded.tokenizer
        policy, source = engines.write(record.version, self._prober, tokenizer, self._weights, self.save_model)
        probe = policy.probe.model_dump_json()
        self._store.add_policy(replace(record, sha256=policy.sha256, probe=probe))
        engines.publish(policy, source)

    def _prune(self) -> None:
        kept = self._config.checkpoint.keep_policies
        if kept == "all":
            return
        most = 0 if kept == "none" else kept
        if isinstance(self._sampler, EnginePublisher):
            most = max(_FOR_ENGINES, most)
        if most:
            prune(self._folder.policies, keep=most)

    def save_model(self, target: Path) -> None:
        """A Hugging Face folder with the current weights and the run's tokenizer."""
        self._weights.save(target)
        for name in _TOKENIZER_FILES:
            source = self._folder.start / name
            if source.exists():
                shutil.copy2(source, target / name)
