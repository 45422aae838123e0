"""Samplers that look at when a row was collected, if at anything."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from replay.sampling.samplers.sampler import DrawClock, Floats, Rows, Sampler

AGES_PER_BLOCK = 256.0
"""Half-lives, or taus, after which weights are counted from another version, long before they leave a float's range."""


class UniformSampler(Sampler):
    """Every row alike."""

    name = "uniform"
    row_wise = True

    def weights(self, rows: Rows) -> Floats:
        return np.ones(len(rows))


class RecencySampler(Sampler):
    """Weight 2^(-staleness / half_life): half as likely every `half_life` policy versions.

    The emphasis on recent experience of Wang and Ross 2019 (arXiv:1906.04009), as a half-life. Unknown: rows of other
    runs, which have no staleness. No signal: rows of one version are uniform.
    """

    name = "recency"
    needs = ("staleness",)
    row_wise = True

    @dataclass(frozen=True)
    class Options:
        half_life: Annotated[float, Field(gt=0)] = 8.0
        """Policy versions."""

    def weights(self, rows: Rows) -> Floats:
        reference = block_end(rows.now.policy_version, AGES_PER_BLOCK * self.options.half_life)
        exponents: Floats = (rows.policy_version - reference) / self.options.half_life
        return np.exp2(exponents)

    def reference(self, now: DrawClock) -> Hashable:
        return block_end(now.policy_version, AGES_PER_BLOCK * self.options.half_life)


def block_end(version: int, length: float) -> float:
    """The first multiple of `length` that is not below the version: weights relative to it stay as they are for a
    while, so that a draw weighs new rows only. The version itself where there are more of them than numbers reach."""
    blocks = version / length
    return math.ceil(blocks) * length if math.isfinite(blocks) else version


class FifoWindowSampler(Sampler):
    """Every row of the newest `window` iterations alike, no other one.

    Uniform over a first-in-first-out window, as found best in arXiv:2604.08706. Rows of other runs have iterations
    of another counting: their priority is unknown. No signal: an empty window gives nothing.
    """

    name = "fifo_window"
    needs = ("staleness",)

    @dataclass(frozen=True)
    class Options:
        window: Annotated[int, Field(ge=1, lt=2**63)] = 8
        """Iterations before the drawing one."""

    def weights(self, rows: Rows) -> Floats:
        newest: Floats = (rows.iteration >= rows.now.iteration - self.options.window).astype(np.float64)
        return newest
