"""Tells from an engine's log-probs whether it has the new weights, the previous ones or others.

An engine in 16 bits rounds at every layer, in its own order, so its log-probs have noise. The learner rounds its
weights as the engine does, but multiplies in float32, which adds no noise. `new` and `before` are the learner's
log-probs with the new and the previous weights. With x = new - before and y = engine - before, the share is sum(x y) /
sum(x x). It is 1 with the new weights and 0 with the previous ones, up to noise not correlated with x.

Example: an update moves two tokens from -1.0 and -2.0 to -0.9 and -2.2 nats. An engine that gives -0.9 and -2.2 has
share 1. An engine that still gives -1.0 and -2.0 has share 0: it still has the previous weights.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

ERRORS = 5.0
"""A share so many standard errors below 1 is not chance: right weights show it in 3 of 10 million publishes."""
WHOLE = 0.9
"""A share from here on counts as the whole update, however small the error. Right engines had 0.99 to 1.03."""
FACTOR, FLOOR = 2.0, 1e-3
"""The largest difference of a right engine: the factor times the learner's own rounding, plus the floor in nats."""
_LEAST_WEIGHT = 1e-6


class Compared(NamedTuple):
    """One token's log-probs, in nats."""

    token: int
    engine: float
    new: float
    """The learner's log-prob with the new weights."""
    rounding: float
    """By how much the learner's log-prob moves when it multiplies in the engine's type."""
    before: float | None = None
    """The learner's log-prob with the previous weights; None where they are not known."""


@dataclass(frozen=True)
class Evidence:
    """The comparison of some tokens' log-probs, in nats. Every mean is a root mean square."""

    tokens: int
    difference: float
    """Mean of engine - new; infinite where the engine gave something other than a number."""
    rounding: float
    """Mean of the tokens' `rounding`."""
    moved: float | None = None
    """Mean of new - before; None where the previous weights are not known."""
    share: float | None = None
    """The part of that move that the engine has made: 1 is all, 0 is none. None where nothing has moved."""
    error: float | None = None
    """Standard error of the share."""

    @property
    def limit(self) -> float:
        """The largest difference that rounding explains."""
        return FLOOR + FACTOR * self.rounding

    @property
    def differs(self) -> bool:
        """Whether the engine has neither the new weights nor any near them."""
        return not self.difference <= self.limit < math.inf

    @property
    def is_behind(self) -> bool:
        """Whether the engine has kept previous weights: by more than chance, and by more than a tenth of the update."""
        return self.share is not None and self.error is not None and self.share < min(WHOLE, 1 - ERRORS * self.error)


def compare_log_probs(tokens: Sequence[Compared]) -> Evidence:
    """Compare the log-probs of all tokens, as evidence about the engine's weights.

    The share's error is the larger of two estimates. The first uses residuals, which show the engine's own noise. The
    second uses the learner's rounding: it stays right where one token moved more than all others together. The same
    token in like contexts is rounded alike. So residuals are summed by token before they are squared, and each sum
    is computed as if the share came from all other tokens (the jackknife of clusters, Bell and McCaffrey 2002).
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
    # By token: its part of `total`, the sum of its residuals, and of its rounding.
    for x, one in moved:
        found = x * x / total, x * ((one.engine - one.new) + (1 - share) * x), x * one.rounding
        sums[one.token] = [before + value for before, value in zip(sums[one.token], found, strict=True)]
    engine_variance = math.fsum((residual / max(1 - part, _LEAST_WEIGHT)) ** 2 for part, residual, _ in sums.values())
    learner_variance = math.fsum(own**2 for _, _, own in sums.values())
    error = math.sqrt(max(engine_variance, learner_variance)) / total
    return Evidence(len(tokens), difference, rounding, _rms([x for x, _ in moved]), share, error)


def _rms(values: Sequence[float]) -> float:
    if not values or not all(map(math.isfinite, values)):
        return math.inf
    return math.sqrt(math.fsum(value * value for value in values) / len(values))
