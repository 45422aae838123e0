"""Strategies that keep every turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from context.messages import Message
from context.strategies.protocol import Append, Arrangement, History, Rewrite, Strategy, shown


@dataclass(frozen=True)
class Linear(Strategy):
    """All is kept, in one segment for as long as the template only appends."""

    def arrange(self, history: History) -> Arrangement:
        return Append()


@dataclass(frozen=True)
class LinearThink(Strategy):
    """Earlier thinking is not shown again: one segment per turn that thinks, all turns kept."""

    def arrange(self, history: History) -> Arrangement:
        if all(turn.reply.reasoning is None for turn in history.turns):
            return Append()
        turns = [
            turn if turn.reply.reasoning is None else replace(turn, reply=replace(turn.reply, reasoning=None))
            for turn in history.turns
        ]
        return Rewrite(shown(history.opening, turns), "strip_thinking")


@dataclass(frozen=True)
class Hint(Linear):
    """The task's hint is in sight while the policy samples and gone when it trains.

    The one exception to "trained in the context it was sampled in": segments are marked `hinted`, and their
    log-probs count as missing.
    """

    def hinted(self, opening: Sequence[Message], hint: str | None) -> tuple[Message, ...]:
        return tuple(opening) if hint is None else (*opening[:-1], replace(opening[-1], note=hint))
