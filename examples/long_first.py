from dataclasses import dataclass

import numpy as np

from replay import Rows, Sampler


class LongFirst(Sampler):
    """Weight num_action_tokens^power: what the policy said most in comes back most."""

    needs = ()  # columns without which a row can't be weighed, such as "mean_entropy" or "staleness"

    @dataclass(frozen=True)
    class Options:
        power: float = 1.0

    def weights(self, rows: Rows) -> np.ndarray:
        return rows.num_action_tokens**self.options.power
