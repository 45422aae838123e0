"""The mathematics of an update: advantages, objectives, corrections and KL.

Begin with `baselines/grpo.py` and `objectives/ppo_clip.py`. Each algorithm is one module of these two folders, with a
record of what configuration and docs need to know (`declarations.py`). `catalog.py` finds them all. Advantages are
computed in `advantages.py` and, with a critic, in `gae.py`; the loss of a batch in `heterogeneous.py`.
docs/add-an-algorithm.md adds one.
"""
