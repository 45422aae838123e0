"""Which stored rows are drawn: samplers say how much each row weighs, and are seeded."""

from replay.sampling.samplers.registry import SAMPLERS, make_sampler
from replay.sampling.samplers.sampler import DrawClock, RankedSampler, Rows, Sampler

__all__ = ["SAMPLERS", "DrawClock", "RankedSampler", "Rows", "Sampler", "make_sampler"]
