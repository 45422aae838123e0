"""The built-in samplers. Each one gives stored rows their weights, and is seeded."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from replay.sampling.base_sampler import Floats, Rows, Sampler

__all__ = ["SAMPLERS", "EntropySampler", "Rows", "Sampler", "make_sampler", "successes"]


class UniformSampler(Sampler):
    """Every row weighs the same."""

    name = "uniform"

    def weights(self, rows: Rows) -> Floats:
        return np.ones(len(rows))


class RecencySampler(Sampler):
    """A row weighs 2^(-staleness / half_life): half as much every `half_life` policy versions.

    This is the emphasis on recent experience of Wang and Ross 2019 (arXiv:1906.04009), as a half-life. Unknown: rows of
    other runs, which have no staleness. No signal: rows of one version weigh the same.
    """

    name = "recency"
    needs = ("staleness",)

    @dataclass(frozen=True)
    class Options:
        half_life: Annotated[float, Field(gt=0)] = 8.0
        """Policy versions."""

    def weights(self, rows: Rows) -> Floats:
        weights: Floats = np.exp2(-rows.staleness / self.options.half_life)
        return weights


class FifoWindowSampler(Sampler):
    """Every row of the newest `window` iterations weighs the same; other rows weigh 0.

    This is uniform replay from a first-in-first-out window, as found best in arXiv:2604.08706. Unknown: rows of other
    runs, which count their own iterations. No signal: an empty window gives no rows.
    """

    name = "fifo_window"
    needs = ("staleness",)

    @dataclass(frozen=True)
    class Options:
        window: Annotated[int, Field(ge=1, lt=2**63)] = 8
        """Number of iterations before the drawing one."""

    def weights(self, rows: Rows) -> Floats:
        newest: Floats = (rows.iteration >= rows.now.iteration - self.options.window).astype(np.float64)
        return newest


class SuccessSampler(Sampler):
    """A row weighs 1 - the success rate of its group, so that hard tasks are replayed more.

    Groups of constant reward weigh 0, because their advantages are 0. A group of one row (hindsight) or of another run
    does not tell how often this policy fails. Its rows weigh Laplace's estimate, (failures + 1) / (members + 2), or 0
    if their advantage is 0. No signal: if no row has a weight, no row is drawn.
    """

    name = "success"

    def weights(self, rows: Rows) -> Floats:
        size, rate = rows.group_size, rows.group_success_rate
        measured = np.where(rows.group_reward_std > 0.0, 1.0 - rate, 0.0)
        estimated = np.where(rows.advantage != 0.0, (size * (1.0 - rate) + 1.0) / (size + 2.0), 0.0)
        return np.where(rows.own & (size > 1), measured, estimated)


def successes(success_rate: Any, group_size: Any) -> Any:
    """Return the number of successes of one group, or of an array of groups."""
    return np.rint(success_rate * group_size)


class DifficultySampler(Sampler):
    """A row weighs exp(-(k - n/2)^2 / (2 sigma^2)) by the number k of successes in its group of n.

    This is after ExGRPO (arXiv:2510.02245), which weighs buckets of rows of equal k, and not rows. No signal: rows of
    equal k and n weigh the same.
    """

    name = "difficulty"

    @dataclass(frozen=True)
    class Options:
        sigma: Annotated[float, Field(gt=0)] = 1.0
        """In successes."""

    def weights(self, rows: Rows) -> Floats:
        counts: Floats = successes(rows.group_success_rate, rows.group_size)
        bell: Floats = np.exp(-(((counts - rows.group_size / 2) / self.options.sigma) ** 2) / 2.0)
        return bell


class RewardSampler(Sampler):
    """A row weighs exp(reward / temperature): RePO's reward-oriented replay (arXiv:2506.09340), with a softmax in place
    of the maximum. No signal: rows of equal reward weigh the same."""

    name = "reward"

    @dataclass(frozen=True)
    class Options:
        temperature: Annotated[float, Field(gt=0)] = 1.0
        """In units of the reward. The quotient is clamped to +-300."""

    def weights(self, rows: Rows) -> Floats:
        weights: Floats = np.exp(np.clip(rows.reward / self.options.temperature, -300.0, 300.0))
        return weights


class MaxVarianceGroupSampler(Sampler):
    """A row weighs the reward variance of its group: RePO's variance-driven replay (arXiv:2506.09340). No signal:
    groups of constant reward are never drawn."""

    name = "max_variance_group"

    def weights(self, rows: Rows) -> Floats:
        return rows.group_reward_std**2


class AdvantageSampler(Sampler):
    """A row weighs |advantage|^exponent: prioritised experience replay (Schaul et al. 2016, arXiv:1511.05952).

    The row's loss is multiplied by (N probability)^-beta, divided by the largest such factor of the draw. The factor is
    exact for draws with replacement; a draw of a small share of the buffer is close to one with replacement. No signal:
    rows of advantage 0 are never drawn.
    """

    name = "advantage"

    @dataclass(frozen=True)
    class Options:
        exponent: Annotated[float, Field(ge=0)] = 0.6
        beta: Annotated[float, Field(ge=0, le=1)] = 0.4

    def weights(self, rows: Rows) -> Floats:
        sizes = np.abs(rows.advantage)
        return np.where(sizes > 0.0, sizes**self.options.exponent, 0.0)

    def correction(self, probability: float, rows: int) -> float:
        return float((rows * probability) ** -self.options.beta)


class EntropySampler(Sampler):
    """The rows of lowest mean entropy are taken from `pool` random candidates per requested row (ExGRPO,
    arXiv:2510.02245).

    The entropy is that of the policy that sampled the row; ExGRPO names the current policy's. No signal: rows of equal
    entropy are taken evenly. A row taken by rank has no probability.
    """

    name = "entropy"
    needs = ("mean_entropy",)

    @dataclass(frozen=True)
    class Options:
        pool: Annotated[int, Field(ge=1, lt=2**63)] = 4

    def weights(self, rows: Rows) -> Floats:
        return np.ones(len(rows))


class FreshnessSampler(AdvantageSampler):
    """A row weighs exp(-staleness / tau) times its weight by `advantage`: a priority that ages (freshness-aware PER).

    The row's loss is multiplied as by `advantage`. Unknown: rows of other runs. No signal: rows of advantage 0 are
    never drawn.
    """

    name = "freshness"
    needs = ("staleness",)

    @dataclass(frozen=True)
    class Options(AdvantageSampler.Options):
        tau: Annotated[float, Field(gt=0)] = 8.0
        """Policy versions."""

    def weights(self, rows: Rows) -> Floats:
        fresh: Floats = np.exp(-rows.staleness / self.options.tau)
        return super().weights(rows) * fresh


_KINDS: tuple[type[Sampler], ...] = (
    *(UniformSampler, RecencySampler, FifoWindowSampler, SuccessSampler, DifficultySampler, EntropySampler),
    *(AdvantageSampler, RewardSampler, MaxVarianceGroupSampler, FreshnessSampler),
)
SAMPLERS = {kind.name: kind for kind in _KINDS}


def make_sampler(kind: str | type[Sampler], seed: int, options: Mapping[str, Any] | None = None) -> Sampler:
    """Make a built-in sampler by its name, or a sampler of a given class. Raises ValueError for wrong options."""
    if isinstance(kind, str):
        if kind not in SAMPLERS:
            raise ValueError(f"replay.sampler must be one of {', '.join(SAMPLERS)}, got {kind!r}.")
        kind = SAMPLERS[kind]
    return kind(seed, options)
