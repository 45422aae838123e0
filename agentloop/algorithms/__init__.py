"""What an update learns by: advantages, objectives, corrections and KL, as mathematics on members and tensors.

Begin with `baselines/grpo.py` and `objectives/ppo_clip.py`: each algorithm is one module of these two folders, and says
of itself what configuration and docs need to know (`declarations.py`). `catalog.py` finds them all. Advantages are
computed in `advantages.py`, the loss of a batch in `heterogeneous.py`. docs/add-an-algorithm.md adds one.
"""
