"""The proof that an engine samples from the policy that was published, and the publish that ends in it.

An engine may answer 200 to a reload and keep some of its old weights, report log-probs from before the temperature, or
have been started again with the weights it began with. Its own word is no evidence; its log-probs are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentloop.errors import UserError
from agentloop.generation.publishing.engine_control import EngineRefused, NextTokens
from agentloop.generation.publishing.published_policy import Probe, PublishedPolicy, read_published, version_in

TOLERANCE, HALF_TOLERANCE = 1e-3, 0.5
"""Nats between learner and engine. Half precision rounds differently in other kernels."""
UNPROVED = "unproved"
"""What an engine is made to call weights that failed their proof."""


class ProofFailed(UserError):
    """The engine does not sample from the policy that was published; nothing may be sampled from it."""


@dataclass(frozen=True)
class Proof:
    """What was compared, and how far apart it was."""

    worst: float
    """Nats."""
    tokens: int


class ProbedEngine(Protocol):
    @property
    def url(self) -> str: ...

    @property
    def model(self) -> str: ...

    def next_tokens(self, prompt_ids: Sequence[int], *, temperature: float, model: str) -> NextTokens: ...

    def tokenize(self, text: str) -> list[int] | None: ...


class PublishedEngine(ProbedEngine, Protocol):
    def label(self) -> str: ...

    def name_weights(self, label: str) -> None: ...

    def reload(self, folder: Path, label: str) -> None: ...

    def adapters(self) -> list[str]: ...

    def load_adapter(self, name: str, folder: Path) -> None: ...

    def unload_adapter(self, name: str) -> None: ...


def publish(engine: PublishedEngine, folder: Path, *, tolerance: float | None = None) -> Proof:
    """Bring the policy in `folder` into the engine and prove it. Raises UserError where it can't be proved.

    What the engine has under the policy's name already, and proves, is not sent again.
    """
    policy = read_published(folder)
    names = engine.adapters() if policy.kind == "lora" else [engine.label()]
    if policy.label in names:
        try:
            return prove(engine, policy, tolerance=tolerance)
        except ProofFailed:
            # Its name is all that it has of the policy.
            _disown(engine, policy)
    if policy.kind == "lora":
        engine.load_adapter(policy.label, folder)
    else:
        engine.reload(folder, policy.label)
    try:
        proof = prove(engine, policy, tolerance=tolerance)
    except ProofFailed:
        _disown(engine, policy)
        raise
    if policy.kind == "lora":
        _unload_older(engine, policy)
    return proof


def _disown(engine: PublishedEngine, policy: PublishedPolicy) -> None:
    """Nothing sampled from now on bears the name of a policy that it is not."""
    if policy.kind == "lora":
        engine.unload_adapter(policy.label)
    else:
        engine.name_weights(f"{UNPROVED} {policy.label}")


def _unload_older(engine: PublishedEngine, policy: PublishedPolicy) -> None:
    """A name is never used again, so that adapters only ever add up. The one before may still be sampled from."""
    of_run = {name: version_in(name, policy.run) for name in engine.adapters() if name != policy.label}
    others = {name: version for name, version in of_run.items() if version is not None}
    before = max((version for version in others.values() if version < policy.version), default=None)
    for name, version in others.items():
        if version != before:
            engine.unload_adapter(name)


def prove(engine: ProbedEngine, policy: PublishedPolicy, *, tolerance: float | None = None) -> Proof:
    """Compare the engine's log-probs after each prompt of the probe with the learner's, sampled as in a rollout.

    Raises ProofFailed where some differ by more than `tolerance` nats (None: 0.001, or 0.5 in half precision).
    """
    limit = tolerance or (HALF_TOLERANCE if policy.half_precision else TOLERANCE)
    probe = policy.probe
    _check_tokenizer(engine, policy)
    model = policy.label if policy.kind == "lora" else engine.model
    worst, tokens, before_temperature = 0.0, 0, 0.0
    for prompt, ids, log_probs in zip(probe.prompts, probe.next_ids, probe.next_log_probs, strict=True):
        found = _asked(engine, policy, prompt, model)
        learner = dict(zip(ids, log_probs, strict=True))
        worst = max(worst, *_differences(learner, found))
        before_temperature = max(before_temperature, _unscaled_difference(learner, found, probe))
        tokens += len(found.log_probs)
    if not worst <= limit:
        what = (
            "They are log-probs from before the temperature: start it with --logprobs-mode processed_logprobs."
            if before_temperature <= limit and math.isfinite(worst) and probe.temperature != 1
            else "It may have kept old weights (a CPU does, of a head tied to the embeddings, when the folder has "
            "none), or have been started from another model. Start it anew from a published folder."
        )
        raise ProofFailed(
            f"{_subject(engine, policy)} must sample with the learner's log-probs (within {limit} nats at temperature "
            f"{probe.temperature:g}), got a difference of {worst:.3g}. {what}"
        )
    return Proof(worst, tokens)


def _subject(engine: ProbedEngine, policy: PublishedPolicy) -> str:
    return f"the engine at {engine.url}, published {policy.label},"


def _check_tokenizer(engine: ProbedEngine, policy: PublishedPolicy) -> None:
    theirs = engine.tokenize(policy.probe.text)
    if theirs is not None and theirs != list(policy.probe.text_ids):
        raise ProofFailed(
            f"{_subject(engine, policy)} must have the learner's tokenizer, got {len(theirs)} other tokens of a text "
            f"that has {len(policy.probe.text_ids)}. Start it from the run's own model folder."
        )


def _asked(engine: ProbedEngine, policy: PublishedPolicy, prompt: Sequence[int], model: str) -> NextTokens:
    try:
        found = engine.next_tokens(prompt, temperature=policy.probe.temperature, model=model)
    except EngineRefused as error:
        if error.status == 400:
            raise ProofFailed(
                f"{_subject(engine, policy)} must take the probe's tokens, got: {error} It may have been started from "
                "another model."
            ) from error
        raise
    if policy.kind == "full" and found.label not in (None, policy.label):
        raise ProofFailed(
            f"{_subject(engine, policy)} must call its weights so, got {found.label!r}. It was started anew, or "
            "somebody else publishes to it: publish again, and let one run publish to an engine."
        )
    if found.model != model:
        raise ProofFailed(f"{_subject(engine, policy)} must sample from {model!r}, got {found.model!r}.")
    return found


def _differences(learner: dict[int, float], found: NextTokens) -> list[float]:
    """Nats apart, of each token that the engine gave. One beyond the learner's list is at most its last one.

    What is no number is infinitely far apart.
    """
    least = min(learner.values())
    apart = [
        abs(value - learner[token]) if token in learner else max(value - least, 0.0)
        for token, value in found.log_probs.items()
    ]
    return apart if all(map(math.isfinite, found.log_probs.values())) else [math.inf]


def _unscaled_difference(learner: dict[int, float], found: NextTokens, probe: Probe) -> float:
    """How far the engine's log-probs are from the learner's at temperature 1, up to their common constant."""
    apart = [value - probe.temperature * learner[token] for token, value in found.log_probs.items() if token in learner]
    return max(apart) - min(apart) if apart else math.inf
