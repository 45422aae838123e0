"""Samplers by name, and the one that is made of another."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from replay.sampling.samplers.by_entropy import EntropySampler
from replay.sampling.samplers.by_outcome import (
    AdvantageSampler,
    DifficultySampler,
    MaxVarianceGroupSampler,
    RewardSampler,
    SuccessSampler,
)
from replay.sampling.samplers.by_recency import (
    AGES_PER_BLOCK,
    FifoWindowSampler,
    RecencySampler,
    UniformSampler,
    block_end,
)
from replay.sampling.samplers.sampler import DrawClock, Floats, RankedSampler, Rows, Sampler, require


class FreshnessSampler(Sampler):
    """Another sampler's weight x exp(-staleness / tau): a priority that ages (freshness-aware PER).

    Unknown: rows of other runs, which have no staleness, and what is unknown to the other sampler. No signal: as the
    other sampler.
    """

    name = "freshness"

    @dataclass(frozen=True)
    class Options:
        tau: Annotated[float, Field(gt=0)] = 8.0
        """Policy versions."""
        sampler: str = "advantage"
        """One that weighs rows; its options stand in `options`."""
        options: dict[str, Any] = field(default_factory=dict)

        def __post_init__(self) -> None:
            weighing = [name for name, kind in _PLAIN.items() if not issubclass(kind, RankedSampler)]
            require(self.sampler in weighing, "sampler", f"be one of {', '.join(weighing)}", self.sampler)

    def __init__(self, seed: int, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(seed, options)
        self._other = _PLAIN[self.options.sampler](0, self.options.options)

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]  # and what the other one needs
        return ("staleness", *self._other.needs)

    @property
    def row_wise(self) -> bool:  # type: ignore[override]  # as the other one
        return self._other.row_wise

    def weights(self, rows: Rows) -> Floats:
        reference = block_end(rows.now.policy_version, AGES_PER_BLOCK * self.options.tau)
        fresh: Floats = np.exp((rows.policy_version - reference) / self.options.tau)
        return self._other.weights(rows) * fresh

    def reference(self, now: DrawClock) -> Hashable:
        return block_end(now.policy_version, AGES_PER_BLOCK * self.options.tau), self._other.reference(now)

    @property
    def corrects(self) -> bool:
        return self._other.corrects

    def correction(self, probability: float, rows: int) -> float:
        return self._other.correction(probability, rows)


_PLAIN: dict[str, type[Sampler]] = {
    kind.name: kind
    for kind in (
        UniformSampler,
        RecencySampler,
        FifoWindowSampler,
        SuccessSampler,
        DifficultySampler,
        EntropySampler,
        AdvantageSampler,
        RewardSampler,
        MaxVarianceGroupSampler,
    )
}
SAMPLERS: dict[str, type[Sampler]] = {**_PLAIN, FreshnessSampler.name: FreshnessSampler}


def make_sampler(kind: str | type[Sampler], seed: int, options: Mapping[str, Any] | None = None) -> Sampler:
    """A built-in sampler by its name, or one of another class. Raises ValueError for what does not fit."""
    if isinstance(kind, str):
        if kind not in SAMPLERS:
            raise ValueError(f"replay.sampler must be one of {', '.join(SAMPLERS)}, got {kind!r}.")
        kind = SAMPLERS[kind]
    return kind(seed, options)
