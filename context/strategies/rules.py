"""Strategies that follow a rule: they keep every turn, or leave things out to make room."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from context.authors import ENV
from context.messages import Message
from context.strategies.protocol import (
    CONTEXT_FULL,
    Append,
    Arrangement,
    History,
    Rewrite,
    Stop,
    Strategy,
    Turn,
    check_tokens,
    shown,
)

_MARGIN = 16
"""Tokens by which a count of contents alone may be wrong."""


@dataclass(frozen=True)
class Linear(Strategy):
    """Keeps everything. An episode is one segment for as long as the template only appends."""

    def arrange(self, history: History) -> Arrangement:
        return Append()


@dataclass(frozen=True)
class LinearThink(Strategy):
    """Keeps every turn, but shows no earlier thinking again: each turn that thinks begins a segment."""

    def arrange(self, history: History) -> Arrangement:
        if all(turn.reply.reasoning is None for turn in history.turns):
            return Append()
        turns = [replace(turn, reply=replace(turn.reply, reasoning=None)) for turn in history.turns]
        return Rewrite(shown(history.opening, turns), "strip_thinking")


@dataclass(frozen=True)
class Hint(Linear):
    """Shows the task's hint while the policy samples, and leaves it out when the policy trains.

    This is the one exception to "trained in the context it was sampled in". The segments are marked `hinted`, and
    their log-probs count as missing.
    """

    def hinted(self, opening: Sequence[Message], hint: str | None) -> tuple[Message, ...]:
        return tuple(opening) if hint is None else (*opening[:-1], replace(opening[-1], note=hint))


@dataclass(frozen=True)
class SlidingWindow(Strategy):
    """Shows the initial messages, and the newest whole turns that fit a prompt of `budget` tokens."""

    budget: int

    def __post_init__(self) -> None:
        check_tokens("budget", self.budget)

    def arrange(self, history: History) -> Arrangement:
        return Append() if fits(history, self.budget) else newest_turns(history, self.budget, kind="drop_turns")


@dataclass(frozen=True)
class ClipToolResults(Strategy):
    """Cuts tool results to `keep_chars`, the oldest first, when a prompt outgrows `budget` tokens, until it fits."""

    budget: int
    keep_chars: int = 200
    marker: str = "\n[clipped]"

    def __post_init__(self) -> None:
        check_tokens("budget", self.budget)
        if self.keep_chars < 0:
            raise ValueError(f"keep_chars must be >= 0, got {self.keep_chars}.")

    def arrange(self, history: History) -> Arrangement:
        if fits(history, self.budget):
            return Append()
        messages = list(history.messages)
        excess = history.prompt_tokens - prompt_limit(history, self.budget)
        for at in self._clippable(history):
            before = messages[at]
            messages[at] = replace(before, content=before.content[: self.keep_chars] + self.marker)
            excess -= history.count(before) - history.count(messages[at])
            # A count of contents is cheap and nearly right. The exact length is measured once the count may fit.
            if excess <= _MARGIN:
                excess = history.measure(messages) - prompt_limit(history, self.budget)
                if excess <= 0:
                    return Rewrite(tuple(messages), "clip_tool_results")
        return Stop(CONTEXT_FULL)

    def _clippable(self, history: History) -> list[int]:
        """The places of results that clipping makes shorter, the oldest first."""
        first = len(history.opening)
        return [
            place
            for place, message in enumerate(history.messages)
            if place >= first
            and (message.author == ENV or message.role not in ("assistant", "user", "system"))
            and len(message.content) > self.keep_chars + len(self.marker)
        ]


def prompt_limit(history: History, budget: int) -> int:
    """The length of the longest prompt: within the budget, and with room for one token of a reply."""
    return min(budget, history.max_tokens - 1)


def fits(history: History, budget: int) -> bool:
    return history.prompt_tokens <= prompt_limit(history, budget)


def newest_turns(history: History, budget: int, *, kind: str) -> Rewrite | Stop:
    """Drop the oldest turns until the prompt fits. The newest turn stays: the policy has not seen its results."""
    limit = prompt_limit(history, budget)
    for kept in suffixes(history, history.opening, limit):
        messages = shown(history.opening, kept)
        if history.measure(messages) <= limit:
            return Rewrite(messages, kind)
    return Stop(CONTEXT_FULL)


def suffixes(history: History, opening: Sequence[Message], limit: int) -> list[tuple[Turn, ...]]:
    """Return the suffixes of the turns, longest first, whose contents and the opening's together fit `limit`."""
    used = sum(map(history.count, opening))
    start = len(history.turns)
    while start > 0:
        used += sum(map(history.count, history.turns[start - 1].messages))
        if used > limit:
            break
        start -= 1
    return [history.turns[first:] for first in range(start, len(history.turns))]
