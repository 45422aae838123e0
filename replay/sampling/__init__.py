"""Sampling chooses the stored rows that a batch replays. Begin with `draw`, which chooses, reads and reserves them.

`eligible_index` keeps the rows that a run may draw in memory. `weights` applies the limits and asks the sampler for a
weight of each row, and `selection` draws rows by these weights. `samplers` has the built-in samplers, subclasses of
`base_sampler.Sampler`. `compatibility` tells which rows of other runs can be compared with the run's own, and `trial`
what the next draw could take.
"""
