"""Rows chosen by how sure the policy was of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from replay.sampling.samplers.sampler import Floats, RankedSampler, Rows, require


class EntropySampler(RankedSampler):
    """Takes, of `pool` random candidates per row asked for, those of lowest mean entropy (ExGRPO, arXiv:2510.02245,
    which takes the surest of a task's solutions), or of the highest.

    policy: stored is the entropy when the row was sampled, and unknown where no generator gave it; current is
    measured by the policy that is about to learn, for every candidate. mode random: every row of known entropy alike.
    Equal entropies are uniform. A row taken by rank has no probability.
    """

    name = "entropy"
    row_wise = True

    @dataclass(frozen=True)
    class Options:
        mode: Literal["argmin", "argmax", "random"] = "argmin"
        policy: Literal["stored", "current"] = "stored"
        pool: Annotated[int, Field(ge=1, lt=2**63)] | None = 4
        """null: all rows there are."""

        def __post_init__(self) -> None:
            measured = self.policy == "current" and self.mode != "random"
            require(not measured or self.pool is not None, "pool", "be a number when policy is current", self.pool)

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]  # depends on the options
        return () if self.measured else ("mean_entropy",)

    @property
    def pool(self) -> int | None:
        pool: int | None = 0 if self.options.mode == "random" else self.options.pool
        return pool

    @property
    def measured(self) -> bool:
        return bool(self.options.policy == "current" and self.options.mode != "random")

    @property
    def sign(self) -> float:
        return -1.0 if self.options.mode == "argmax" else 1.0

    def weights(self, rows: Rows) -> Floats:
        return np.ones(len(rows))

    def scores(self, rows: Rows) -> Floats:
        return self.sign * rows.mean_entropy
