"""Engines elsewhere sample from the policy: they are found, and get each new version with a proof."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

from transformers import PreTrainedTokenizerBase

from agentloop.config import RunConfig
from agentloop.errors import UserError
from agentloop.generation.publishing.engine_control import EngineControl, EngineRefused
from agentloop.generation.publishing.one_publisher import one_publisher
from agentloop.generation.publishing.proof import Proof, ProofFailed, publish
from agentloop.generation.publishing.published_policy import NumberType, PublishedPolicy, read_published
from agentloop.generation.remote.connect import connect_engine
from agentloop.generation.remote.engine_client import RemoteEngine
from agentloop.generation.remote.server_facts import read_key
from agentloop.models.loading import LoadedModel
from agentloop.models.policy_weights import PolicyWeights
from agentloop.runs.run_folder import COMPLETE
from agentloop.training.policies.probe import Prober
from agentloop.training.policies.published_folder import write_published
from replay.ticket_records import PUBLISHING, SERVING

_LOOK_AGAIN_S = 2.0

Report = Callable[[str, Mapping[str, Any]], None]
"""Called with an engine's URL and what is known of it: see `replay.storage.collecting.participants`."""


class EnginePublisher:
    """Writes each version into a folder of `policies` and brings it into every engine."""

    def __init__(
        self,
        engine: RemoteEngine,
        controls: Sequence[EngineControl],
        policies: Path,
        *,
        run: str,
        restart_timeout_s: float,
        report: Report,
    ) -> None:
        self.number_type = _number_type(controls)
        self.engine = engine
        self._controls = controls
        self._policies = policies
        self._run = run
        self._restart_timeout_s = restart_timeout_s
        self._report = report

    def write(
        self,
        version: int,
        prober: Prober,
        tokenizer: PreTrainedTokenizerBase,
        weights: PolicyWeights,
        save_model: Callable[[Path], None],
    ) -> PublishedPolicy:
        """The weights in place become a published policy, or are one already."""
        target = self._policies / f"{version:06d}"
        self._remove_newer(version)
        if not (target / COMPLETE).exists():
            probe = prober.probe(tokenizer)
            write_published(target, weights, save_model, probe=probe, run=self._run, version=version)
        return read_published(target)

    def publish(self, policy: PublishedPolicy) -> None:
        """Nothing is sampled under its number before every engine's log-probs have proved it. Raises UserError."""
        target = self._policies / f"{policy.version:06d}"
        facts = {"version": policy.version, "label": policy.label}
        facts["adapter"] = policy.label if policy.kind == "lora" else None
        for control in self._controls:
            self.engine.withdraw(control.url)
            self._report(control.url, {**facts, "state": PUBLISHING, "model": control.model})
        for control in self._controls:
            proof = self._bring(control, target)
            serving = {**facts, "state": SERVING, "model": control.model, "difference": proof.difference}
            self._report(control.url, serving)
        self.engine.published(policy.version, name=policy.label if policy.kind == "lora" else None, label=policy.label)

    def _bring(self, control: EngineControl, target: Path) -> Proof:
        """Into one engine; one that died is waited for. What can't be proved is brought once more."""
        deadline, refused = time.monotonic() + self._restart_timeout_s, False
        while True:
            try:
                with one_publisher(self._policies, control.url):
                    return publish(control, target)
            except ProofFailed:
                # It may have been started anew in the middle.
                if refused:
                    raise
                refused = True
            except EngineRefused as error:
                understood = error.status is not None and error.status < 500
                if understood or time.monotonic() >= deadline:
                    raise
                time.sleep(_LOOK_AGAIN_S)

    def _remove_newer(self, version: int) -> None:
        """A run that goes on from a checkpoint makes the later versions anew."""
        for folder in self._policies.glob("[0-9]*"):
            # What a learner that was killed was writing has another ending.
            if int(folder.name.partition(".")[0]) > version:
                shutil.rmtree(folder)


def connect_engines(
    config: RunConfig, loaded: LoadedModel, *, policies: Path, run: str, note: Callable[[str], None], report: Report
) -> EnginePublisher:
    """The engines of `engine.urls`, once each of them answers. Raises UserError where one can't be this run's."""
    section, key = config.engine, read_key(config.engine.api_key_env)
    engine = connect_engine(
        config, stop_ids=loaded.stop_ids, vocab_size=loaded.vocab_size, run=policies.parent, note=note
    )
    controls = [EngineControl(server.url, model=server.model, key=key) for server in engine.servers]
    return EnginePublisher(
        engine, controls, policies, run=run, restart_timeout_s=section.restart_timeout_s, report=report
    )


def _number_type(controls: Sequence[EngineControl]) -> NumberType:
    """In which all engines multiply."""
    found = {control.url: control.number_type() for control in controls}
    (first, *others) = found.values()
    known = get_args(NumberType)
    if first not in known or any(other != first for other in others):
        said = ", ".join(f"{number_type} at {url}" for url, number_type in found.items())
        raise UserError(
            f"engine.urls must all multiply in one of {', '.join(known)}, got {said}. Start them with the same --dtype."
        )
    return cast(NumberType, first)
