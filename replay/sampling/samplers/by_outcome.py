"""Samplers that look at how an episode, or its group, ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from replay.sampling.samplers.sampler import Floats, Rows, Sampler


class SuccessSampler(Sampler):
    """Weight 1 - success rate of the row's group: what is still hard comes back.

    Groups of constant reward weigh 0, the solved and the hopeless alike: their advantages are 0 and nothing can be
    learned from them. A group of one (hindsight) or of another run (a teacher's, an import's) does not say how often
    the policy fails: its rows weigh Laplace's estimate, (failures + 1) / (members + 2), or 0 if their advantage is 0.
    No signal: where no row has a weight nothing is drawn.
    """

    name = "success"
    row_wise = True

    def weights(self, rows: Rows) -> Floats:
        size, rate = rows.group_size, rows.group_success_rate
        measured = np.where(rows.group_reward_std > 0.0, 1.0 - rate, 0.0)
        estimated = np.where(rows.advantage != 0.0, (size * (1.0 - rate) + 1.0) / (size + 2.0), 0.0)
        return np.where(rows.own & (size > 1), measured, estimated)


def successes(success_rate: Any, group_size: Any) -> Any:
    """k of a difficulty bucket, of one group or of an array of them."""
    return np.rint(success_rate * group_size)


class DifficultySampler(Sampler):
    """Rows in buckets by the success count k of their group of n.

    gaussian: weight exp(-(k - n/2)^2 / (2 sigma^2)), most for groups solved half of the time (after ExGRPO,
    arXiv:2510.02245, whose buckets have these weights; here each of a bucket's rows has).
    uniform_buckets: weight 1 / rows of the same k and n that can be drawn, every bucket alike.
    hard: weight 1 - k/n. easy: weight k/n. No signal: one bucket is uniform.
    """

    name = "difficulty"

    @dataclass(frozen=True)
    class Options:
        mode: Literal["gaussian", "uniform_buckets", "hard", "easy"] = "gaussian"
        sigma: Annotated[float, Field(gt=0)] = 1.0
        """The width of `gaussian`, in successes."""

    @property
    def row_wise(self) -> bool:  # type: ignore[override]  # depends on the mode
        return bool(self.options.mode != "uniform_buckets")

    def weights(self, rows: Rows) -> Floats:
        sizes = rows.group_size
        counts: Floats = successes(rows.group_success_rate, sizes)
        match self.options.mode:
            case "gaussian":
                bell: Floats = np.exp(-(((counts - sizes / 2) / self.options.sigma) ** 2) / 2.0)
                return bell
            case "hard":
                return 1.0 - counts / sizes
            case "easy":
                return counts / sizes
            case _:
                _, bucket, members = np.unique(counts + 1j * sizes, return_inverse=True, return_counts=True)
                return 1.0 / members[bucket]


class RewardSampler(Sampler):
    """Weight exp(reward / temperature): what paid most comes back most (RePO's reward-oriented replay,
    arXiv:2506.09340, with a softmax in place of the maximum). No signal: equal rewards are uniform."""

    name = "reward"
    row_wise = True

    @dataclass(frozen=True)
    class Options:
        temperature: Annotated[float, Field(gt=0)] = 1.0
        """Reward units; rewards beyond 300 of them count as 300."""

    def weights(self, rows: Rows) -> Floats:
        weights: Floats = np.exp(np.clip(rows.reward / self.options.temperature, -300.0, 300.0))
        return weights


class MaxVarianceGroupSampler(Sampler):
    """Weight reward variance of the row's group: most for groups that tell good from bad most clearly (RePO's
    variance-driven replay, arXiv:2506.09340). No signal: groups of constant reward are never drawn."""

    name = "max_variance_group"
    row_wise = True

    def weights(self, rows: Rows) -> Floats:
        return rows.group_reward_std**2


class AdvantageSampler(Sampler):
    """Weight |advantage|^exponent, corrected by importance weights (N probability)^-beta over the largest of the draw
    (prioritised experience replay, Schaul et al. 2016, arXiv:1511.05952).

    The weight comes with the row and multiplies its loss; beta 1 undoes the priority, 0 corrects nothing. The formula
    is that of draws with replacement, which draws of a small share of the buffer are close to. No signal: rows of
    advantage 0 are never drawn, as they teach nothing.
    """

    name = "advantage"
    row_wise = True

    @dataclass(frozen=True)
    class Options:
        exponent: Annotated[float, Field(ge=0)] = 0.6
        beta: Annotated[float, Field(ge=0, le=1)] = 0.4

    def weights(self, rows: Rows) -> Floats:
        sizes = np.abs(rows.advantage)
        return np.where(sizes > 0.0, sizes**self.options.exponent, 0.0)

    def correction(self, probability: float, rows: int) -> float:
        return float((rows * probability) ** -self.options.beta)
