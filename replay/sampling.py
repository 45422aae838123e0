"""Which stored rows are drawn: seeded, weighted, without replacement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Candidates:
    """The rows a draw may take, in an order that depends on their content alone. Arrays are [N], aligned with `ids`."""

    ids: list[str]
    group_success_rate: npt.NDArray[np.float64]
    """Share of successful members of the row's group, at birth."""
    sources: npt.NDArray[np.object_]
    runs: npt.NDArray[np.object_]
    tasks: npt.NDArray[np.object_]
    groups: npt.NDArray[np.object_]
    group_sizes: npt.NDArray[np.int64]
    rewards: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.ids)


class Sampler(ABC):
    """Says how much each candidate weighs and picks some of them; its random state belongs in the checkpoint."""

    name: str

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)
        self._random = np.random.Generator(self._bits)

    @abstractmethod
    def weights(self, candidates: Candidates) -> npt.NDArray[np.float64]:
        """[N] >= 0; a row of weight 0 is never drawn."""

    def select(self, weights: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.intp]:
        """At most `count` positions, one after another in proportion to the weights that are left.

        Successive sampling by exponential races: position i arrives at time Exp(1) / w_i and the earliest `count` are
        taken (Efraimidis and Spirakis 2006). One uniform number is consumed per position, drawn or not.
        """
        arrivals = np.full(len(weights), np.inf)
        np.divide(-np.log1p(-self._random.random(len(weights))), weights, out=arrivals, where=weights > 0)
        order: npt.NDArray[np.intp] = np.argsort(arrivals, kind="stable")[:count]
        drawn: npt.NDArray[np.intp] = order[np.isfinite(arrivals[order])]
        return drawn

    def state(self) -> dict[str, Any]:
        """JSON-able."""
        return {"name": self.name, "random": self._bits.state}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if state["name"] != self.name:
            raise ValueError(
                f"replay.sampler must be the one the state was saved by ({state['name']}), got {self.name}. "
                f"Set replay.sampler: {state['name']}, or start a new run."
            )
        self._bits.state = state["random"]


class UniformSampler(Sampler):
    """Every row alike."""

    name = "uniform"

    def weights(self, candidates: Candidates) -> npt.NDArray[np.float64]:
        return np.ones(len(candidates))


class SuccessSampler(Sampler):
    """Weight 1 - success rate of the row's group: what is still hard comes back. Rows of solved groups never do."""

    name = "success"

    def weights(self, candidates: Candidates) -> npt.NDArray[np.float64]:
        return 1.0 - candidates.group_success_rate


SAMPLERS: dict[str, type[Sampler]] = {cls.name: cls for cls in (UniformSampler, SuccessSampler)}


def make_sampler(name: str, seed: int) -> Sampler:
    if name not in SAMPLERS:
        raise ValueError(f"replay.sampler must be one of {', '.join(SAMPLERS)}, got {name!r}.")
    return SAMPLERS[name](seed)
