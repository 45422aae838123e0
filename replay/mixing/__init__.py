"""Mixing decides how many fresh and replayed trajectories a batch has. Begin with `batch_plan`.

`mix_settings` has the keys of `replay` that a plan follows, `request` the records in which an iteration asks for rows
and the buffer answers. `apportion` rounds shares so that nothing is lost over a run.
"""
