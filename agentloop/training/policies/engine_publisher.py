"""Publishes policies to engines, which sample from them. Each engine gets every new version, and must prove it.

The proof: before and after an update, the learner scores the ends of some replies. An engine that has loaded the new
version scores the same tokens. Its log-probs must match the new weights, not the old ones.
"""

import hashlib
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast, get_args

import torch
from transformers import PreTrainedTokenizerBase

from agentloop.engines.publish.engine_control import LIKELIEST, EngineControl, EngineRefused
from agentloop.engines.publish.proof import PROOFS, Proof, ProofFailed, Source, bring_policy
from agentloop.engines.publish.published_policy import NumberType, Probe, PublishedPolicy, one_publisher, read_published
from agentloop.engines.remote.engine_client import RemoteEngine, connect_engine
from agentloop.engines.remote.server_facts import read_key
from agentloop.engines.serving.served_engine import ServedEngine
from agentloop.errors import UserError
from agentloop.models.loading import LoadedModel
from agentloop.models.policy_weights import PolicyWeights, RowScores
from agentloop.rollouts.actors import stop_strings
from agentloop.runs.run_folder import COMPLETE, RunFolder
from agentloop.training.policies.publisher import Publisher
from agentloop.training.policies.weights_for_engines import shared_weights, write_published
from replay.records import PolicyRecord, Trajectory
from replay.storage.collecting.ticket_records import PUBLISHING, SERVING
from replay.store import ReplayStore

_LOOK_AGAIN_S = 2.0
_TEXTS = (
    "The capital of France is",
    "2 + 2 = 4, and 17 * 23 =",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return",
    '{"name": "search", "arguments": {"query": "weather in',
    "Naïve “quotes”, 東京, 🙂 and  two spaces:",
    "Question: which of the two is heavier?\nAnswer:",
    "<b>Once</b> upon a time there was a",
    "1. Open the file.\n2. Read a line.\n3.",
)
_ROWS, _TOKENS = 16, 64
"""Rows of a proof, and tokens of each. With n tokens, the smallest change that is found falls as 1/sqrt(n)."""

Rows = tuple[tuple[int, ...], ...]


class EnginePublisher(Publisher):
    """Brings each version into every engine, from a folder of `policies` or through shared memory."""

    generator: RemoteEngine
    least_folders = 2  # an engine that restarts gets the newest one

    def __init__(
        self,
        loaded: LoadedModel,
        engine: RemoteEngine,
        store: ReplayStore,
        *,
        folder: RunFolder,
        weights: PolicyWeights,
        served: ServedEngine | None = None,
    ) -> None:
        """`served` is the run's own engine, if it has one. Raises UserError for engines of several number types."""
        super().__init__(loaded, engine, store, folder=folder, weights=weights)
        key = read_key()
        self._controls = [EngineControl(server.url, model=server.model, key=key) for server in engine.servers]
        self._prober = Prober(weights, _common_number_type(self._controls), folder.config.rollout.temperature)
        self._restart_timeout_s = folder.config.engine.restart_timeout_s
        self._served = served
        self._sleep_level = 0 if served is None else served.options.sleep_level
        self.seconds: dict[str, float] = defaultdict(float)
        """Seconds of the parts of a publish since the last sampling ended, by the names of their metrics."""

    def remember(self, trajectories: Sequence[Trajectory]) -> None:
        """Score the ends of trajectories before an update, for the proof after it."""
        self._prober.remember(probe_rows(trajectories))

    def check(self) -> None:
        if self._served is not None:
            self._served.check()

    def sleep(self) -> bool:
        self.seconds.clear()
        self.check()
        if self._sleep_level:
            with self._naming_engine_end():
                for control in self._controls:
                    self.generator.withdraw(control.url)
                    control.sleep(self._sleep_level)
        return bool(self._sleep_level)

    def resume(self, version: int) -> None:
        self._hand_over(self._record(version))

    def _hand_over(self, record: PolicyRecord) -> None:
        policy, source = self._write_policy(record.version)
        self._store.add_policy(replace(record, sha256=policy.sha256, probe=policy.probe.model_dump_json()))
        self._bring_to_all(policy, source)

    def _write_policy(self, version: int) -> tuple[PublishedPolicy, Source]:
        """Write the present weights as a published policy, and return it with the source from which engines load it."""
        policies, run = self._folder.policies, self._folder.run_id
        for folder in policies.glob("[0-9]*"):
            # A resumed run makes the later versions again. A folder that a killed learner was writing has another
            # ending.
            if int(folder.name.partition(".")[0]) > version:
                shutil.rmtree(folder)
        target = policies / f"{version:06d}"
        if (target / COMPLETE).exists():
            return read_published(target), target
        with self._timed("probe"):
            probe = self._prober.probe(self._loaded.tokenizer)
        if self._served is not None and self._served.options.shares_memory:
            digest = hashlib.sha256(probe.model_dump_json().encode()).hexdigest()
            policy = PublishedPolicy(run=run, version=version, kind="full", sha256=digest, probe=probe)
            return policy, partial(shared_weights, self._weights)
        with self._timed("write"):
            policy = write_published(target, self._weights, self.save_model, probe=probe, run=run, version=version)
        return policy, target

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[f"time/publish_{part}"] += time.monotonic() - began

    def _bring_to_all(self, policy: PublishedPolicy, source: Source) -> None:
        """Bring the policy into all engines. Replies get its version only after every engine has proved it."""
        if self._sleep_level:
            torch.cuda.empty_cache()  # the engine is about to take its memory back
        adapter = policy.label if policy.kind == "lora" else None
        facts = {"version": policy.version, "label": policy.label, "adapter": adapter}
        for control in self._controls:
            self.generator.withdraw(control.url)
            self._report(control, facts, state=PUBLISHING)
        for control in self._controls:
            with self._naming_engine_end():
                proof = self._bring(control, policy, source)
            self.seconds["time/publish_load"] += proof.load_s
            self.seconds["time/publish_prove"] += proof.prove_s
            if self._sleep_level:
                self.seconds["time/wake"] += control.wake_s
            self._report(control, facts, state=SERVING, difference=proof.weights.difference)
        self.generator.published(policy.version, name=adapter, label=policy.label)

    def _report(self, control: EngineControl, facts: dict[str, Any], **now: Any) -> None:
        """Store an engine's state, which workers read: see `replay.storage.collecting.participants`."""
        self._store.roles.report("engine", self._folder.run_id, control.url, {**facts, **now, "model": control.model})

    @contextmanager
    def _naming_engine_end(self) -> Iterator[None]:
        """Raises EngineEnded where a request within the block fails because the run's own engine has ended."""
        try:
            yield
        except EngineRefused:
            self.check()
            raise

    def _bring(self, control: EngineControl, policy: PublishedPolicy, source: Source) -> Proof:
        """Bring the policy into one engine. Wait for an engine that died, and try a failed proof once more."""
        policies = self._folder.policies
        deadline, refused = time.monotonic() + self._restart_timeout_s, False
        while True:
            try:
                with one_publisher(policies, control.url):
                    return bring_policy(control, policy, source, record=policies / PROOFS)
            except ProofFailed:
                # The engine may have been restarted in the middle.
                if refused:
                    raise
                refused = True
            except EngineRefused as error:
                understood = error.status is not None and error.status < 500
                if understood or time.monotonic() >= deadline:
                    raise
                time.sleep(_LOOK_AGAIN_S)


def connect_engines(
    folder: RunFolder,
    loaded: LoadedModel,
    store: ReplayStore,
    *,
    weights: PolicyWeights,
    note: Callable[[str], None],
    served: ServedEngine | None,
) -> EnginePublisher:
    """Connect the engines of `engine.urls`, or the run's own. Raises UserError for one that can't be used."""
    strings = stop_strings(folder.config, loaded)
    if strings:
        raise UserError(
            f"rollout.engine must be local where replies end at texts, got vllm and context.stop_strings {strings}. "
            "Use a model with an end of turn of its own."
        )
    config = folder.config if served is None else served.connected(folder.config)
    engine = connect_engine(config, stop_ids=loaded.stop_ids, vocab_size=loaded.vocab_size, note=note)
    return EnginePublisher(loaded, engine, store, folder=replace(folder, config=config), weights=weights, served=served)


def _common_number_type(controls: Sequence[EngineControl]) -> NumberType:
    """The type that all engines multiply in. Raises UserError where they differ."""
    found = {control.url: control.number_type() for control in controls}
    (first, *others) = found.values()
    known = get_args(NumberType)
    if first not in known or any(other != first for other in others):
        said = ", ".join(f"{number_type} at {url}" for url, number_type in found.items())
        raise UserError(
            f"engine.urls must all multiply in one of {', '.join(known)}, got {said}. Give all one --dtype."
        )
    return cast(NumberType, first)


def probe_rows(trajectories: Sequence[Trajectory]) -> Rows:
    """The ends of the last replies of some trajectories, evenly spread over all."""
    step = max(1, len(trajectories) // _ROWS)
    rows = (_last_words(trajectory) for trajectory in trajectories[::step][:_ROWS])
    return tuple(row for row in rows if len(row) > 1)


def _last_words(trajectory: Trajectory) -> tuple[int, ...]:
    tokens = trajectory.segments[-1].tokens
    sampled = (tokens.policy_versions >= 0).nonzero()[0]
    end = int(sampled[-1]) + 1 if len(sampled) else len(tokens)
    return tuple(tokens.token_ids[max(0, end - _TOKENS - 1) : end].tolist())


class Prober:
    """Scores the same tokens with the weights before an update and with the weights after it."""

    def __init__(self, weights: PolicyWeights, number_type: NumberType, temperature: float) -> None:
        """`number_type` is the type that engines multiply in, `temperature` the one of sampling."""
        self._weights, self._number_type, self._temperature = weights, number_type, temperature
        self._rows: Rows = ()
        self._before: tuple[tuple[float, ...], ...] = ()

    def remember(self, rows: Rows) -> None:
        """Score rows with the weights before they change."""
        self._rows = rows
        self._before = tuple(row.log_probs for row in self._scores(rows)) if rows else ()

    def probe(self, tokenizer: PreTrainedTokenizerBase) -> Probe:
        """Make the probe of the present weights, from remembered rows or, without any, from fixed texts."""
        rows = self._rows or tuple(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in _TEXTS)
        found = self._scores(rows)
        scores: dict[str, Any] = {name: tuple(getattr(row, name) for row in found) for name in RowScores._fields}
        how = {"number_type": self._number_type, "temperature": self._temperature}
        return Probe(rows=rows, before=self._before or None, **how, **scores)

    def _scores(self, rows: Rows) -> list[RowScores]:
        return self._weights.scores(rows, number_type=self._number_type, temperature=self._temperature, most=LIKELIEST)
