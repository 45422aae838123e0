"""How many fresh and replayed trajectories a batch has. Begin with `batch_plan`, which plans one iteration's batch.

`mix_settings` are the keys of `replay` that it follows, `request` is what it asks of the buffer and what the buffer can
give, and `apportion` rounds shares so that nothing is lost over a run.
"""
