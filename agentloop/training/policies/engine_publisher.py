"""Engines elsewhere sample from the policy: they are found, and get each new version with a proof."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import torch
from transformers import PreTrainedTokenizerBase

from agentloop.config import RunConfig
from agentloop.engines.publish.engine_control import EngineControl, EngineRefused
from agentloop.engines.publish.proof import PROOFS, Proof, ProofFailed, Source, bring
from agentloop.engines.publish.published_policy import NumberType, PublishedPolicy, one_publisher, read_published
from agentloop.engines.remote.connect import connect_engine
from agentloop.engines.remote.engine_client import RemoteEngine
from agentloop.engines.remote.server_facts import read_key
from agentloop.engines.serving.served_engine import ServedEngine
from agentloop.errors import UserError
from agentloop.models.loading import LoadedModel
from agentloop.models.policy_weights import PolicyWeights
from agentloop.runs.run_folder import COMPLETE
from agentloop.training.policies.probe import Prober
from agentloop.training.policies.published_folder import write_published
from agentloop.training.policies.shared_weights import shared_weights
from replay.ticket_records import PUBLISHING, SERVING

_LOOK_AGAIN_S = 2.0

Report = Callable[[str, Mapping[str, Any]], None]
"""Called with an engine's URL and what is known of it: see `replay.storage.collecting.participants`."""


class EnginePublisher:
    """Brings each version into every engine: out of a folder of `policies`, or of memory that it shares with it."""

    def __init__(
        self,
        engine: RemoteEngine,
        controls: Sequence[EngineControl],
        policies: Path,
        *,
        run: str,
        restart_timeout_s: float = 0.0,
        report: Report,
        served: ServedEngine | None = None,
    ) -> None:
        """`served`: the one engine is the run's own."""
        self.number_type = _number_type(controls)
        self.engine = engine
        self._controls = controls
        self._policies = policies
        self._run = run
        self._restart_timeout_s = restart_timeout_s
        self._report = report
        self._served = served
        self.seconds: dict[str, float] = defaultdict(float)
        """What parts of a publish took since engines were last done with sampling, by the names of their metrics."""

    def check(self) -> None:
        """Raises EngineEnded where the run's own engine is gone."""
        if self._served is not None:
            self._served.check()

    def sleep(self) -> bool:
        """Nothing is sampled until the next publish: an engine on the learner's GPU leaves it the memory. True: it did.

        Raises EngineEnded where the run's own engine is gone.
        """
        self.seconds.clear()
        self.check()
        if self._served is None or not self._served.options.sleep_level:
            return False
        with self._its_end_is_named():
            for control in self._controls:
                self.engine.withdraw(control.url)
                control.sleep(self._served.options.sleep_level)
        return True

    def write(
        self,
        version: int,
        prober: Prober,
        tokenizer: PreTrainedTokenizerBase,
        weights: PolicyWeights,
        save_model: Callable[[Path], None],
    ) -> tuple[PublishedPolicy, Source]:
        """The weights in place become a published policy, or are one already; and where engines get them from."""
        target = self._policies / f"{version:06d}"
        self._remove_newer(version)
        if (target / COMPLETE).exists():
            return read_published(target), target
        with self._timed("probe"):
            probe = prober.probe(tokenizer)
        if self._served is not None and self._served.options.shares_memory:
            digest = hashlib.sha256(probe.model_dump_json().encode()).hexdigest()
            policy = PublishedPolicy(run=self._run, version=version, kind="full", sha256=digest, probe=probe)
            return policy, partial(shared_weights, weights)
        with self._timed("write"):
            policy = write_published(target, weights, save_model, probe=probe, run=self._run, version=version)
        return policy, target

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[f"time/publish_{part}"] += time.monotonic() - began

    def publish(self, policy: PublishedPolicy, source: Source) -> None:
        """Nothing is sampled under its number before every engine's log-probs have proved it. Raises UserError."""
        if self._served is not None and self._served.options.sleep_level:
            torch.cuda.empty_cache()  # the engine is about to take its own memory again
        facts = {"version": policy.version, "label": policy.label}
        facts["adapter"] = policy.label if policy.kind == "lora" else None
        for control in self._controls:
            self.engine.withdraw(control.url)
            self._report(control.url, {**facts, "state": PUBLISHING, "model": control.model})
        for control in self._controls:
            with self._its_end_is_named():
                proof = self._bring(control, policy, source)
            self.seconds["time/publish_load"] += proof.load_s
            self.seconds["time/publish_prove"] += proof.prove_s
            if self._served is not None and self._served.options.sleep_level:
                self.seconds["time/wake"] += control.wake_s
            serving = {**facts, "state": SERVING, "model": control.model, "difference": proof.difference}
            self._report(control.url, serving)
        self.engine.published(policy.version, name=policy.label if policy.kind == "lora" else None, label=policy.label)

    @contextmanager
    def _its_end_is_named(self) -> Iterator[None]:
        """The run's own engine refuses what it is asked: is it there at all?"""
        try:
            yield
        except EngineRefused:
            self.check()
            raise

    def _bring(self, control: EngineControl, policy: PublishedPolicy, source: Source) -> Proof:
        """Into one engine; one that died is waited for. What can't be proved is brought once more."""
        deadline, refused = time.monotonic() + self._restart_timeout_s, False
        while True:
            try:
                with one_publisher(self._policies, control.url):
                    return bring(control, policy, source, record=self._policies / PROOFS)
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
    config: RunConfig,
    loaded: LoadedModel,
    *,
    policies: Path,
    run: str,
    note: Callable[[str], None],
    report: Report,
    served: ServedEngine | None,
) -> EnginePublisher:
    """The engines of `engine.urls`, once each of them answers, or the run's own.

    Raises UserError where one can't be this run's.
    """
    config = config if served is None else served.connected(config)
    section, key = config.engine, read_key(config.engine.api_key_env)
    engine = connect_engine(
        config, stop_ids=loaded.stop_ids, vocab_size=loaded.vocab_size, run=policies.parent, note=note
    )
    controls = [EngineControl(server.url, model=server.model, key=key) for server in engine.servers]
    return EnginePublisher(
        engine,
        controls,
        policies,
        run=run,
        restart_timeout_s=section.restart_timeout_s,
        report=report,
        served=served,
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
