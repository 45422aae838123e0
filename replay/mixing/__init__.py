"""Mixing decides how many fresh and replayed trajectories a batch has. Begin with `batch_plan`.

`batch_plan` plans one iteration's batch by the keys of `replay` in `mix_settings`. `request` has the records in which
an iteration asks for rows and the buffer says what it can give. `apportion` rounds shares so that nothing is lost over
a run.
"""
