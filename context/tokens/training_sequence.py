"""The training sequences of an episode while they grow: each prompt extends the one before, with the reply between."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from context.authors import DEMONSTRATION, LLM, AuthorTable
from context.tokens.loss_mask import mark_untrained
from context.tokens.token_sequence import NOT_SAMPLED, BehaviorContext, Segment, SegmentReason, TokenSequence

_ROUNDING = 1e-2
"""Nats by which an engine in 16 bits may round the log-prob of a certain token above 0."""


def sampled_tokens(
    token_ids: Sequence[int], log_probs: Sequence[float], policy_version: int | Sequence[int], *, authors: AuthorTable
) -> TokenSequence:
    """The tokens of a reply with the author of sampled tokens. If all log-probs are NaN, a demonstrator wrote them.

    `policy_version` is one for all tokens, or one per token. Raises ValueError for tokens and log-probs that no policy
    can have sampled.
    """
    n, nats = len(token_ids), [*map(float, log_probs)]
    unknown = sum(map(math.isnan, nats))
    if unknown not in (0, n) or any(map(math.isinf, nats)):
        raise ValueError("log_probs must be finite, or all NaN, got something between. Mend what sampled them.")
    if min(token_ids) < 0 or (not unknown and max(nats) > _ROUNDING):
        raise ValueError(
            f"token_ids must not be negative and log_probs not above 0, got {min(token_ids)} and {max(nats):g}. "
            "Mend what sampled them: log-probs are natural logarithms of probabilities."
        )
    versions = np.asarray(NOT_SAMPLED if unknown else policy_version, np.int32)
    return TokenSequence(
        np.array(token_ids, np.int32),
        np.full(n, authors.code(DEMONSTRATION if unknown else LLM), np.uint8),
        np.array(nats, np.float32),
        versions if versions.ndim else np.full(n, versions, np.int32),
    )


class OpenSegment:
    """A training sequence that still grows: each prompt extends the one before."""

    def __init__(self, prompt: TokenSequence, hinted: TokenSequence | None, *, reason: SegmentReason) -> None:
        """`prompt` is the prompt to train with. `hinted` is the prompt with a hint that the policy sees; None: there is
        no hint."""
        self.reason: SegmentReason = reason
        self.behavior_context: BehaviorContext = "plain" if hinted is None else "hinted"
        self.has_replies = False
        self._ids: list[int] = (prompt if hinted is None else hinted).token_ids.tolist()
        self._parts: list[tuple[TokenSequence, int | None]] = [(prompt, None)]

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> list[int]:
        """All tokens that the policy has seen and sampled here."""
        return list(self._ids)

    def show(self, tokens: TokenSequence, *, turn: int | None = None) -> None:
        self._parts.append((tokens, turn))
        self._ids += tokens.token_ids.tolist()

    def say(self, tokens: TokenSequence, *, turn: int | None) -> None:
        """Appends a reply of a turn. None: the reply belongs to no turn."""
        if self.behavior_context == "hinted":
            tokens = replace(tokens, behavior_log_probs=np.full(len(tokens), np.nan, np.float32))
        self.show(tokens, turn=turn)
        self.has_replies = True

    def closed(self, untrained_turns: Collection[int], authors: AuthorTable) -> Segment:
        parts = [
            mark_untrained(tokens, np.ones(len(tokens), bool), authors) if turn in untrained_turns else tokens
            for tokens, turn in self._parts
        ]
        return Segment(TokenSequence.concatenate(parts), self.reason, self.behavior_context)
