"""The proof that an engine samples from the policy that was published, and the publish that ends in it.

An engine may answer 200 to a reload and keep some of its old weights, report log-probs from before the temperature, or
have been started again with the weights it began with. Its own word is no evidence; its log-probs are.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from agentloop.engines.publish.engine_control import EngineRefused, Scored
from agentloop.engines.publish.evidence import Compared, Evidence, weigh
from agentloop.engines.publish.published_policy import Probe, PublishedPolicy, read_published, version_in
from agentloop.errors import UserError

UNPROVED = "unproved"
"""What an engine is made to call weights that failed their proof."""
PROOFS = "proofs.jsonl"
"""Beside the policies: what was compared in each proof, one JSON object on a line."""


class ProofFailed(UserError):
    """The engine does not sample from the policy that was published; nothing may be sampled from it."""


@dataclass(frozen=True)
class Proof:
    """What was compared."""

    weights: Evidence
    """Of tokens that the probe gives, at temperature 1; of an adapter those of `sampling`."""
    sampling: Evidence
    """Of the likeliest next tokens, at the temperature they are sampled at."""
    load_s: float = 0.0
    """Seconds in which the engine got the weights."""
    prove_s: float = 0.0

    @property
    def difference(self) -> float:
        """Root mean square between engine and learner, in nats."""
        return self.weights.difference

    @property
    def holds(self) -> bool:
        return not (self.weights.differs or self.weights.is_behind or self.sampling.differs)


class ProbedEngine(Protocol):
    @property
    def url(self) -> str: ...

    @property
    def model(self) -> str: ...

    def number_type(self) -> str: ...

    def scored(self, row: Sequence[int], *, temperature: float, model: str, whole: bool = True) -> Scored: ...

    def tokenize(self, text: str) -> list[int] | None: ...


class PublishedEngine(ProbedEngine, Protocol):
    def label(self) -> str: ...

    def name_weights(self, label: str) -> None: ...

    def reload(self, folder: Path, label: str) -> None: ...

    def receive(self, update: Mapping[str, Any], label: str) -> None: ...

    def adapters(self) -> list[str]: ...

    def load_adapter(self, name: str, folder: Path) -> None: ...

    def unload_adapter(self, name: str) -> None: ...


Source = Path | Callable[[], AbstractContextManager[Mapping[str, Any]]]
"""Where weights come from: a published folder, or memory, whose handles are made anew for each time they are sent."""


def publish(engine: PublishedEngine, folder: Path) -> Proof:
    """Bring the policy in `folder` into the engine and prove it. Raises UserError where it can't be proved."""
    return bring(engine, read_published(folder), folder, record=folder.parent / PROOFS)


def bring(engine: PublishedEngine, policy: PublishedPolicy, source: Source, *, record: Path) -> Proof:
    """Give the engine the policy's weights, and prove them. Raises UserError where they can't be proved.

    What the engine has under the policy's name already, and proves, is not sent again. What was compared is written
    down in `record`.
    """
    names = engine.adapters() if policy.kind == "lora" else [engine.label()]
    if policy.label in names:
        try:
            return prove(engine, policy, record=record)
        except ProofFailed:
            # Its name is all that it has of the policy.
            _disown(engine, policy)
    began = time.monotonic()
    if not isinstance(source, Path):
        with source() as update:
            engine.receive(update, policy.label)
    elif policy.kind == "lora":
        engine.load_adapter(policy.label, source)
    else:
        engine.reload(source, policy.label)
    loaded = time.monotonic()
    try:
        proof = replace(prove(engine, policy, record=record), load_s=loaded - began)
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


def prove(engine: ProbedEngine, policy: PublishedPolicy, *, record: Path | None = None) -> Proof:
    """Compare what the engine says of the probe's tokens with the learner's word. Raises ProofFailed.

    `record` gets a line with what was compared.
    """
    began = time.monotonic()
    _check_tokenizer(engine, policy)
    _check_number_type(engine, policy)
    model = policy.label if policy.kind == "lora" else engine.model
    with ThreadPoolExecutor(len(policy.probe.rows)) as pool:
        found = list(pool.map(lambda row: _asked(engine, policy, row, model), policy.probe.rows))
    following = _following(policy.probe, found)
    likeliest = [one for row in following for one in row]
    given = _given(policy.probe, found) if policy.kind == "full" else likeliest
    proof = Proof(weigh(given), weigh(likeliest), prove_s=time.monotonic() - began)
    if record is not None:
        _write_down(record, engine, policy, proof, [given, *following])
    if not proof.holds:
        raise ProofFailed(_refusal(engine, policy, proof, given, following))
    return proof


def _given(probe: Probe, found: Sequence[Scored]) -> list[Compared]:
    """The rows' own tokens."""
    before = probe.before or [[None] * len(row) for row in probe.log_probs]
    columns = zip(probe.rows, found, probe.log_probs, probe.rounding, before, strict=True)
    return [
        Compared(*one)
        for row, scored, *numbers in columns
        for one in zip(row[1:], scored.log_probs, *numbers, strict=True)
    ]


def _following(probe: Probe, found: Sequence[Scored]) -> list[list[Compared]]:
    """Next tokens that engine and learner both name, after each row."""
    columns = zip(found, probe.next_ids, probe.next_log_probs, probe.next_rounding, strict=True)
    return [
        [
            Compared(token, scored.following[token], log_prob, rounding)
            for token, log_prob, rounding in zip(*lists, strict=True)
            if token in scored.following
        ]
        for scored, *lists in columns
    ]


def _write_down(
    record: Path, engine: ProbedEngine, policy: PublishedPolicy, proof: Proof, compared: Sequence[Sequence[Compared]]
) -> None:
    """Of a refusal all numbers, of any other proof their summary."""
    line: dict[str, Any] = {"policy": policy.label, "engine": engine.url, "holds": proof.holds, **asdict(proof)}
    if not proof.holds:
        line |= {"columns": Compared._fields, "compared": compared}
    with record.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _refusal(
    engine: ProbedEngine,
    policy: PublishedPolicy,
    proof: Proof,
    given: Sequence[Compared],
    following: Sequence[Sequence[Compared]],
) -> str:
    weights, sampling = proof.weights, proof.sampling
    worst = _worst(given)
    if weights.is_behind:
        what = (
            f"of an update that moves them by {weights.moved:.3g} nats it shows {weights.share:.0%}, within "
            f"{weights.error:.0%}: it has kept weights of before. Start it anew from a published folder."
        )
    elif weights.differs:
        what = f"they differ by {weights.difference:.3g} nats where rounding explains {weights.limit:.2g}: {_CAUSES}"
    else:
        temperature, worst = _temperature(policy.probe, following), _worst([one for row in following for one in row])
        what = (
            f"next tokens differ by {sampling.difference:.3g} nats where rounding explains {sampling.limit:.2g}, as at "
            f"temperature {temperature:.2g}. "
        )
        what += _BEFORE_TEMPERATURE if abs(temperature - 1) < _NEAR_ONE else "Start it with its own sampling settings."
    return (
        f"{_subject(engine, policy)} must sample with the learner's log-probs at temperature "
        f"{policy.probe.temperature:g}, got {worst}; {what}"
    )


_CAUSES = (
    "it may have kept old weights (a CPU does, of a head tied to the embeddings, when the folder has none), or have "
    "been started from another model. Start it anew from a published folder."
)
_NEAR_ONE = 0.05
_BEFORE_TEMPERATURE = (
    "It gives log-probs from before the temperature: start it with --logprobs-mode processed_logprobs."
)


def _worst(compared: Sequence[Compared]) -> str:
    """The token that differs most."""
    apart = [abs(one.engine - one.new) for one in compared]
    if not apart:
        return "none of them"
    one = compared[max(range(len(apart)), key=lambda at: apart[at] if math.isfinite(apart[at]) else math.inf)]
    before = "" if one.before is None else f", {one.before:.4g} before the update"
    return f"{one.engine:.4g} of token {one.token} where it has {one.new:.4g}{before}"


def _temperature(probe: Probe, following: Sequence[Sequence[Compared]]) -> float:
    """At which the engine's next tokens are: the slope of their log-probs over the learner's, in each row."""
    across, along = 0.0, 0.0
    for row in following:
        mean = math.fsum(one.new for one in row) / max(1, len(row))
        across += math.fsum(one.engine * (one.new - mean) for one in row)
        along += math.fsum(one.new * (one.new - mean) for one in row)
    return probe.temperature * along / across if across > 0 else math.inf


def _subject(engine: ProbedEngine, policy: PublishedPolicy) -> str:
    return f"the engine at {engine.url}, published {policy.label},"


def _check_tokenizer(engine: ProbedEngine, policy: PublishedPolicy) -> None:
    theirs = engine.tokenize(policy.probe.text)
    if theirs is not None and theirs != list(policy.probe.text_ids):
        raise ProofFailed(
            f"{_subject(engine, policy)} must have the learner's tokenizer, got {len(theirs)} other tokens of a text "
            f"that has {len(policy.probe.text_ids)}. Start it from the run's own model folder."
        )


def _check_number_type(engine: ProbedEngine, policy: PublishedPolicy) -> None:
    theirs = engine.number_type()
    if theirs != policy.probe.number_type:
        raise ProofFailed(
            f"{_subject(engine, policy)} must multiply in {policy.probe.number_type} as the run's engines did when it "
            f"was written, got {theirs}. Start it with that --dtype."
        )


def _asked(engine: ProbedEngine, policy: PublishedPolicy, row: Sequence[int], model: str) -> Scored:
    try:
        # vLLM 0.32 has no log-probs of a prompt for an adapter while others sample: its engine ends with an error.
        whole = policy.kind == "full"
        found = engine.scored(row, temperature=policy.probe.temperature, model=model, whole=whole)
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
