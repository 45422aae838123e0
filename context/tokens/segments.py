"""The training sequences of an episode while they grow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from context.authors import AuthorTable
from context.tokens.control import TrainingControl, withhold
from context.tokens.token_sequence import BehaviorContext, Segment, SegmentReason, TokenSequence


class OpenSegment:
    """What was shown and sampled in one unbroken stretch: each prompt extends the one before."""

    def __init__(self, prompt: TokenSequence, hinted: TokenSequence | None, *, reason: SegmentReason) -> None:
        """The first prompt as it is trained; if the policy sees another one, with a hint, that too."""
        self.reason: SegmentReason = reason
        self.behavior_context: BehaviorContext = "plain" if hinted is None else "hinted"
        self.has_replies = False
        self._ids: list[int] = (prompt if hinted is None else hinted).token_ids.tolist()
        self._parts: list[tuple[TokenSequence, int | None]] = [(prompt, None)]

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> list[int]:
        """All that the policy has seen and said here."""
        return list(self._ids)

    def show(self, tokens: TokenSequence) -> None:
        self._add(tokens, None)

    def say(self, tokens: TokenSequence, *, turn: int | None) -> None:
        """Append a reply. None: it belongs to no turn."""
        if self.behavior_context == "hinted":
            tokens = replace(tokens, behavior_log_probs=np.full(len(tokens), np.nan, np.float32))
        self._add(tokens, turn)
        self.has_replies = True

    def closed(self, control: TrainingControl, num_turns: int, authors: AuthorTable) -> Segment:
        parts = [
            tokens
            if turn is None or control.trains(turn, num_turns)
            else withhold(tokens, np.ones(len(tokens), bool), authors)
            for tokens, turn in self._parts
        ]
        return Segment(TokenSequence.concatenate(parts), self.reason, self.behavior_context)

    def _add(self, tokens: TokenSequence, turn: int | None) -> None:
        self._parts.append((tokens, turn))
        self._ids += tokens.token_ids.tolist()
