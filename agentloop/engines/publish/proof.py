"""The proof that an engine samples from the policy that was published, and the publish that ends in it.

An engine may answer 200 to a reload and still keep some old weights. It may report log-probs from before the
temperature, or have restarted with its first weights. Its answers and labels prove nothing; its log-probs do.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from agentloop.engines.publish.engine_control import EngineControl, EngineRefused, Scored
from agentloop.engines.publish.log_prob_comparison import Compared, Evidence, compare_log_probs
from agentloop.engines.publish.published_policy import Probe, PublishedPolicy, read_published, version_in
from agentloop.errors import UserError

UNPROVED = "unproved"
"""The label of weights that failed their proof."""
PROOFS = "proofs.jsonl"
"""A file next to the policies, with the numbers of each proof as a JSON object on a line."""
Source = Path | Callable[[], AbstractContextManager[Mapping[str, Any]]]
"""Where weights come from: a published folder, or memory, whose handles are made anew for each transfer."""


class ProofFailed(UserError):
    """The engine does not sample from the policy that was published; nothing may be sampled from it."""


@dataclass(frozen=True)
class Proof:
    weights: Evidence
    """The comparison of the probe's tokens at temperature 1; for an adapter it equals `sampling`."""
    sampling: Evidence
    """The comparison of the likeliest next tokens, at the temperature of sampling."""
    load_s: float = 0.0
    prove_s: float = 0.0

    @property
    def holds(self) -> bool:
        return not (self.weights.differs or self.weights.is_behind or self.sampling.differs)


def publish(engine: EngineControl, folder: Path) -> Proof:
    """Load the policy in `folder` into the engine and prove it. Raises UserError if the proof fails."""
    return bring_policy(engine, read_published(folder), folder, record=folder.parent / PROOFS)


def bring_policy(engine: EngineControl, policy: PublishedPolicy, source: Source, *, record: Path) -> Proof:
    """Give the engine the policy's weights, and prove them. Raises UserError where they can't be proved.

    Weights that the engine already has under the policy's name are proved, and sent again only if the proof fails. The
    compared numbers are appended to the file `record`.
    """
    names = engine.adapters() if policy.kind == "lora" else [engine.label()]
    if policy.label in names:
        try:
            return prove(engine, policy, record=record)
        except ProofFailed:
            # The engine has only the policy's name, and other weights.
            _take_name(engine, policy)
    began = time.monotonic()
    if not isinstance(source, Path):
        with source() as update:
            engine.receive(update, policy.label)
    elif policy.kind == "lora":
        engine.load_adapter(policy.label, source)
    else:
        engine.reload(source, policy.label)
    load_s = time.monotonic() - began
    try:
        proof = replace(prove(engine, policy, record=record), load_s=load_s)
    except ProofFailed:
        _take_name(engine, policy)
        raise
    if policy.kind == "lora":
        _unload_older(engine, policy)
    return proof


def _take_name(engine: EngineControl, policy: PublishedPolicy) -> None:
    """Take the policy's name away from weights that are not the policy's, before anything else is sampled."""
    if policy.kind == "lora":
        engine.unload_adapter(policy.label)
    else:
        engine.name_weights(f"{UNPROVED} {policy.label}")


def _unload_older(engine: EngineControl, policy: PublishedPolicy) -> None:
    """Unload adapters of older versions. The previous version stays: unfinished replies may still sample from it."""
    versions = {name: version_in(name, policy.run) for name in engine.adapters() if name != policy.label}
    others = {name: version for name, version in versions.items() if version is not None}
    before = max((version for version in others.values() if version < policy.version), default=None)
    for name, version in others.items():
        if version != before:
            engine.unload_adapter(name)


def prove(engine: EngineControl, policy: PublishedPolicy, *, record: Path | None = None) -> Proof:
    """Compare the engine's log-probs of the probe with the learner's, noted in `record`. Raises ProofFailed."""
    began = time.monotonic()
    subject, probe = f"the engine at {engine.url}, published {policy.label},", policy.probe
    number_type = engine.number_type()
    if number_type != probe.number_type:
        raise ProofFailed(
            f"{subject} must multiply in {probe.number_type} as the run's engines did when it was written, got "
            f"{number_type}. Start it with that --dtype."
        )
    with ThreadPoolExecutor(len(probe.rows)) as pool:
        found = list(pool.map(lambda row: _score_row(engine, policy, row, subject), probe.rows))
    following = _compare_following(probe, found)
    likeliest = [one for row in following for one in row]
    given = _compare_given(probe, found) if policy.kind == "full" else likeliest
    proof = Proof(compare_log_probs(given), compare_log_probs(likeliest), prove_s=time.monotonic() - began)
    if record is not None:
        line = {"policy": policy.label, "engine": engine.url, "holds": proof.holds, **asdict(proof)}
        with record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    if not proof.holds:
        raise ProofFailed(
            f"{subject} must sample with the learner's log-probs at temperature {probe.temperature:g}, got "
            f"{_explain_failure(proof, given, following)}"
        )
    return proof


def _score_row(engine: EngineControl, policy: PublishedPolicy, row: Sequence[int], subject: str) -> Scored:
    """Ask the engine for its log-probs of one row. Raises ProofFailed where another model answers."""
    model = policy.label if policy.kind == "lora" else engine.model
    try:
        # vLLM 0.32 has no log-probs of a prompt for an adapter while others sample: its engine ends with an error.
        whole = policy.kind == "full"
        found = engine.score_tokens(row, temperature=policy.probe.temperature, model=model, whole=whole)
    except EngineRefused as error:
        if error.status == 400:
            raise ProofFailed(
                f"{subject} must take the probe's tokens, got: {error} It may have been started from another model."
            ) from error
        raise
    if policy.kind == "full" and found.label != policy.label:
        raise ProofFailed(
            f"{subject} must have this label for its weights, got {found.label!r}. It was started again, or another "
            "run publishes to it. Publish again, and let one run alone publish to an engine."
        )
    if found.model != model:
        raise ProofFailed(f"{subject} must sample from {model!r}, got {found.model!r}.")
    return found


def _compare_given(probe: Probe, found: Sequence[Scored]) -> list[Compared]:
    before = probe.before or [[None] * len(row) for row in probe.log_probs]
    columns = zip(probe.rows, found, probe.log_probs, probe.rounding, before, strict=True)
    return [
        Compared(*one)
        for row, scored, *numbers in columns
        for one in zip(row[1:], scored.log_probs, *numbers, strict=True)
    ]


def _compare_following(probe: Probe, found: Sequence[Scored]) -> list[list[Compared]]:
    """Compare, after each row, the next tokens that engine and learner both name."""
    columns = zip(found, probe.next_ids, probe.next_log_probs, probe.next_rounding, strict=True)
    return [
        [
            Compared(token, scored.following[token], log_prob, rounding)
            for token, log_prob, rounding in zip(*lists, strict=True)
            if token in scored.following
        ]
        for scored, *lists in columns
    ]


def _explain_failure(proof: Proof, given: Sequence[Compared], following: Sequence[Sequence[Compared]]) -> str:
    """Say what shows that the engine has other weights, or samples in another way, and what to do."""
    weights, sampling = proof.weights, proof.sampling
    if weights.is_behind:
        return (
            f"{_worst(given)}; of an update that moves them by {weights.moved:.3g} nats it shows {weights.share:.0%}, "
            f"within {weights.error:.0%}: it has kept previous weights. Start it again from a published folder."
        )
    if weights.differs:
        return (
            f"{_worst(given)}; they differ by {weights.difference:.3g} nats where rounding explains "
            f"{weights.limit:.2g}: it may have kept old weights (on CPU, vLLM keeps a head tied to the "
            "embeddings when the folder has none), or have been started from another model. Start it again from a "
            "published folder."
        )
    return (
        f"{_worst([one for row in following for one in row])}; next tokens differ by {sampling.difference:.3g} nats "
        f"where rounding explains {sampling.limit:.2g}. Start it with --logprobs-mode processed_logprobs (else it "
        "gives log-probs from before the temperature), and without sampling settings of its own."
    )


def _worst(compared: Sequence[Compared]) -> str:
    if not compared:
        return "none of them"
    apart = [abs(one.engine - one.new) for one in compared]
    one = compared[max(range(len(apart)), key=lambda at: apart[at] if math.isfinite(apart[at]) else math.inf)]
    before = "" if one.before is None else f", {one.before:.4g} before the update"
    return f"{one.engine:.4g} of token {one.token} where it has {one.new:.4g}{before}"
