"""How a process of a run is set up: its threads, its seeds and its determinism."""

from __future__ import annotations

import random

import numpy as np
import torch

from agentloop.config import RunConfig
from agentloop.config.seeds import derive_seed


def seed_process(config: RunConfig) -> None:
    """Threads and seeds of the whole process."""
    torch.set_num_threads(config.run.threads)
    seed = derive_seed(config.run.seed, "process")
    torch.manual_seed(seed)
    # Nothing here uses these two; an environment of the user's may.
    random.seed(seed)
    np.random.seed(seed % 2**32)
