"""Which stored rows are drawn: samplers say how much each row weighs, and are seeded."""

from replay.sampling.samplers.base import Moment, RankedSampler, Rows, Sampler
from replay.sampling.samplers.registry import SAMPLERS, make_sampler

__all__ = ["SAMPLERS", "Moment", "RankedSampler", "Rows", "Sampler", "make_sampler"]
