"""Checks, before a run begins, for faults that would spoil it silently."""

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from agentloop.config import RunConfig
from agentloop.engines import GenerationRequest
from agentloop.engines.local.local_generator import LocalGenerator
from agentloop.errors import UserError
from agentloop.models.actor import Actor
from agentloop.models.memory import in_gb
from agentloop.supervised.supervised_update import row_log_probs

_TOLERANCE, _HALF_TOLERANCE = 1e-3, 0.5
"""Largest differences between sampling and scoring, in nats. Half precision rounds differently in batches of different
shapes, where single tokens of little probability may be nats off, so its limit is for the mean."""


def check_scoring(generator: LocalGenerator, actor: Actor, *, text: Sequence[int] = (3, 4, 5, 6, 7)) -> bool:
    """Check that log-probs from sampling and scoring agree to 0.001 nats, over two turns and ragged prompts.

    Raises UserError for an architecture whose state the generation's cache does not keep. If only autocast rounds to 16
    bits, the log-probs must agree without autocast. `text` has tokens that the model knows: their log-probs are rounded
    least.
    """
    if actor.compute.autocast != "none":
        exact = actor.compute.model_copy(update={"autocast": "none"})
        plain = LocalGenerator(actor.model, stop_ids=frozenset(), compute=exact)
        check_scoring(plain, Actor(actor.model, packs=actor.packs, compute=exact), text=text)
    prompts, worst = {0: list(text), 1: list(text[:2])}, 0.0
    generator.begin(seed=0, temperature=1.0)
    for _ in range(2):
        requests = [GenerationRequest(episode, ids, 4) for episode, ids in prompts.items()]
        completions = list(generator.generate(requests))
        both = list(zip(requests, completions, strict=True))
        rows = [[*request.prompt_ids, *completion.token_ids] for request, completion in both]
        apart = _score_differences(actor, rows, [completion.log_probs for completion in completions])
        worst = max(worst, float(apart.mean() if actor.half_precision else apart.max()))
        prompts = {request.episode: [*row, *text[:2]] for request, row in zip(requests, rows, strict=True)}
    limit, kind = _HALF_TOLERANCE if actor.half_precision else _TOLERANCE, type(actor.model).__name__
    other = "another architecture, or batch.layout: padded" if actor.packs else "another architecture"
    if not worst <= limit:
        raise UserError(
            f"model.path must give the same log-probs when sampling and when scoring (within {limit} nats), got a "
            f"difference of {worst:.3g} with {kind}. Use {other}."
        )
    return worst <= _TOLERANCE and not actor.half_precision


def check_disk(config: RunConfig, *, weights: int, state: int, least_policies: int, free: int) -> str:
    """Say how much disk the run's checkpoints and policies take; the buffer's size depends on the episodes.

    `weights` counts the bytes of a policy's files, `state` the other bytes of a checkpoint, `free` the free bytes of
    the disk. Raises UserError if the first two checkpoints have no room.
    """
    section, iterations = config.checkpoint, config.run.iterations
    checkpoints = min(section.keep, 1 + -(-iterations // section.every))
    kept = {"all": iterations + 1, "none": 0}.get(str(section.keep_policies), section.keep_policies)
    policies = min(max(int(kept), least_policies), iterations + 1)
    best = weights if section.best else 0
    one, end = weights + state, checkpoints * (weights + state) + policies * weights + best
    if 2 * one > free:
        raise UserError(
            f"run.folder must have room for two checkpoints of {in_gb(one)}, got too little at "
            f"{config.run.folder} ({free:,} bytes free). Make room, choose another, or train adapters (lora.rank)."
        )
    parts = f"checkpoints: {checkpoints} of {in_gb(one)}"
    parts += f", policies: {policies} of {in_gb(weights)}" if policies else ""
    parts += f", the best one: {in_gb(best)}" if best else ""
    # A new checkpoint, and a new best policy, are written before the oldest is removed.
    low = " Too much: lower checkpoint.keep or checkpoint.keep_policies." * (end + one + best > free)
    return f"disk: {in_gb(end)} of {in_gb(free)} free in the end, and the buffer ({parts}).{low}"


def _score_differences(
    actor: Actor, rows: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]
) -> torch.Tensor:
    """Absolute differences of the log-probs of each row's last tokens; all rows are scored at once."""
    sampled = [torch.arange(len(row)) >= len(row) - len(known) for row, known in zip(rows, log_probs, strict=True)]
    with torch.no_grad():
        again = row_log_probs(actor, rows, sampled)
    stored = torch.tensor([value for row in log_probs for value in row], dtype=again.dtype, device=again.device)
    return (again[pad_sequence(sampled, batch_first=True).to(again.device)] - stored).abs()
