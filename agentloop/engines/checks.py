"""What any engine answers is looked at before it is recorded: what is recorded is trained.

It is the law for every generator, whoever wrote it; what a server says besides is looked at in `remote.believed`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from agentloop.engines.generator import Completion, GenerationFailed, GenerationRequest, Generator

_ROUNDING = 1e-6
"""A log-prob this far above 0 is a rounding error of softmax; beyond it, it is no log-prob."""


def replies(
    generator: Generator, requests: Sequence[GenerationRequest], *, vocab_size: int
) -> list[Completion | GenerationFailed]:
    """One per request, in their order: a completion that can be recorded, or why there is none."""
    try:
        given = generator.generate(requests)
    except GenerationFailed as failure:
        return [failure] * len(requests)
    if len(given) != len(requests):  # which reply is whose is anyone's guess
        return [GenerationFailed(f"{len(given)} replies to {len(requests)} requests")] * len(requests)
    return [recordable(request, reply, vocab_size=vocab_size) for request, reply in zip(requests, given, strict=True)]


def recordable(
    request: GenerationRequest, reply: Completion | GenerationFailed, *, vocab_size: int
) -> Completion | GenerationFailed:
    """The reply if it can be recorded, else why not."""
    problem = None if isinstance(reply, GenerationFailed) else _problem(request, reply, vocab_size)
    return reply if problem is None else GenerationFailed(problem)


def _problem(request: GenerationRequest, reply: Completion, vocab_size: int) -> str | None:
    n = len(reply.token_ids)
    if not 1 <= n <= request.max_new_tokens:
        return f"{n} tokens where 1 to {request.max_new_tokens} were asked for"
    for name, values in (("log-probs", reply.log_probs), ("entropies", reply.entropies)):
        if values is None:
            continue
        if len(values) != n:
            return f"{len(values)} {name} for {n} tokens"
        odd = next((value for value in values if not math.isfinite(value)), None)
        if odd is not None:
            return f"{name} with {odd} among them"
    if max(reply.log_probs) > _ROUNDING:
        return f"a log-prob of {max(reply.log_probs)}, which is above 0"
    if not isinstance(reply.policy_version, int) and len(reply.policy_version) != n:
        return f"{len(reply.policy_version)} policy versions for {n} tokens"
    outside = next((token for token in reply.token_ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        return f"token {outside} of a vocabulary of {vocab_size}"
    return None
