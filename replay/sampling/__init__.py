"""Which stored rows a batch gets. Begin with `draw`: rows are chosen, read and reserved there.

`eligible_index` holds the rows that a run may draw, `weights` what they weigh under the limits, and `selection` takes
some of them. `samplers` are the built-in ones, each a `base_sampler.Sampler`. `compatibility` says which rows of other
runs mean the same, `trial` what the next draw could take, `restart_curriculum` where new episodes begin.
"""
