"""Whether an engine has the new weights, the ones before or others, by the log-probs it gives to the same tokens.

An engine in 16 bits rounds at every layer, in an order of its own: its log-probs are those of its weights plus noise.
The learner rounds its weights as the engine does and multiplies in float32, which adds none. With x = new - before and
y = engine - before, both by the learner's word, the share = sum(x y) / sum(x x) is 1 with the new weights and 0 with
those before, up to noise that is not correlated with x.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

ERRORS = 5.0
"""Standard errors below 1 from which on a share is no chance: 3 in 10 million publishes of the right weights."""
WHOLE = 0.9
"""From this share on the move is taken for whole, however small the error: 0.99 to 1.03 were seen of right engines."""
FACTOR, FLOOR = 2.0, 1e-3
"""An engine differs from the learner by at most so much: times the learner's own rounding, and nats besides."""
_LEAST_WEIGHT = 1e-6


class Compared(NamedTuple):
    """One token's log-probs, in nats."""

    token: int
    engine: float
    new: float
    """The learner's."""
    rounding: float
    """What the learner's own moves when it multiplies in the engine's type."""
    before: float | None = None
    """The learner's, with the weights before; None: they are not known."""


@dataclass(frozen=True)
class Evidence:
    """What the log-probs of some tokens say, in nats; means are root mean squares."""

    tokens: int
    difference: float
    """Mean of engine - new; infinite where the engine gave something that is no number."""
    rounding: float
    """Mean of what the learner's own log-probs move when it multiplies in the engine's type."""
    moved: float | None = None
    """Mean of new - before; None where the weights before are not known."""
    share: float | None = None
    """How much of that move the engine has made: 1 is all of it, 0 none. None where nothing has moved."""
    error: float | None = None
    """Standard error of the share."""

    @property
    def limit(self) -> float:
        """The largest difference that rounding explains."""
        return FLOOR + FACTOR * self.rounding

    @property
    def differs(self) -> bool:
        """The engine has neither the new weights nor ones near them."""
        return not self.difference <= self.limit < math.inf

    @property
    def is_behind(self) -> bool:
        """The engine has weights before, or has kept some of them: by more than chance, and more than a tenth."""
        return self.share is not None and self.error is not None and self.share < min(WHOLE, 1 - ERRORS * self.error)


def weigh(tokens: Sequence[Compared]) -> Evidence:
    """What they say together of the engine's weights.

    The error of the share is the larger of two: that of its residuals, which knows the engine's own noise, and that of
    the learner's rounding, which is not deceived by one token that has moved more than all others together. Wherever
    the same token stands, like contexts round alike: residuals are summed for each before they are squared, and each
    of these sums is as if the share came of all others (the jackknife of clusters, Bell and McCaffrey 2002).
    """
    difference, rounding = _rms([one.engine - one.new for one in tokens]), _rms([one.rounding for one in tokens])
    moved = [(one.new - one.before, one) for one in tokens if one.before is not None]
    if not moved or not math.isfinite(difference):
        return Evidence(len(tokens), difference, rounding)
    total = math.fsum(x * x for x, _ in moved)
    if total == 0:
        return Evidence(len(tokens), difference, rounding, moved=0.0)
    # engine - before = x + (engine - new)
    share = 1 + math.fsum(x * (one.engine - one.new) for x, one in moved) / total
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    # Of each token: its part of `total`, its residuals, and its rounding.
    for x, one in moved:
        found = x * x / total, x * ((one.engine - one.new) + (1 - share) * x), x * one.rounding
        sums[one.token] = [before + value for before, value in zip(sums[one.token], found, strict=True)]
    of_engine = math.fsum((residual / max(1 - part, _LEAST_WEIGHT)) ** 2 for part, residual, _ in sums.values())
    of_learner = math.fsum(own**2 for _, _, own in sums.values())
    error = math.sqrt(max(of_engine, of_learner)) / total
    return Evidence(len(tokens), difference, rounding, _rms([x for x, _ in moved]), share, error)


def _rms(values: Sequence[float]) -> float:
    if not values or not all(map(math.isfinite, values)):
        return math.inf
    return math.sqrt(math.fsum(value * value for value in values) / len(values))
