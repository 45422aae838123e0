"""Values of the states that a run's trajectories passed, as baselines of single turns."""

import math
from collections import Counter
from collections.abc import Sequence

from agentloop.records import TurnStates
from replay.records import Trajectory


class StateValues:
    """V(s): the mean discounted return of a run's recent trajectories that passed s. Each counts once.

    GiGPO (Feng et al. 2025, arXiv 2505.10978) and RTMC (arXiv 2604.11037) compare trajectories of one batch by states.

    The return of a trajectory of K turns from its turn k (0, 1, ..) on is gamma^(K-1-k) R, with R its stored reward.
    If it passes a state twice, the first visit's return counts.

    Bias: V is not the value of the present policy, because several policies made the trajectories, and equal states may
    have different histories. As a baseline V still adds no bias for fresh rows. The state is a function of the messages
    before the reply, and the trajectory itself is left out. So V does not depend on the reply, and
    E[V grad log pi(reply | all before it)] = 0. A *replayed* row is also compared with trajectories of policies that
    have learned from it: there the bias is small only as far as this one row changed them little.
    """

    def __init__(self, find_states: TurnStates, *, gamma: float, max_age: int | None) -> None:
        """A trajectory counts for `max_age` iterations after the one it was added in; None means for ever."""
        self._find_states, self._gamma, self._max_age = find_states, gamma, max_age
        self._visits: dict[str, dict[str, tuple[int, float]]] = {}
        """(iteration, return) by state and trajectory id."""
        self._counts: dict[str, Counter[float]] = {}
        """Number of trajectories by return, for the states that were looked up since the visits changed."""

    def add(self, rows: Sequence[Trajectory], *, iteration: int) -> None:
        """Add an iteration's fresh rows, and drop rows that are too old by now."""
        self._counts.clear()
        if self._max_age is not None:
            oldest = iteration - self._max_age
            young = {s: {id: v for id, v in passed.items() if v[0] >= oldest} for s, passed in self._visits.items()}
            self._visits = {state: passed for state, passed in young.items() if passed}
        for row, states in zip(rows, self._find_states(rows), strict=True):
            for state, value in zip(states or (), self._returns(row, len(states or ())), strict=True):
                self._visits.setdefault(state, {}).setdefault(row.id, (iteration, value))

    def value(self, state: str, *, without: str) -> float | None:
        """V of a state without one trajectory; None where no other passed it."""
        passed = self._visits.get(state, {})
        if state not in self._counts:  # many rows share a state, and few returns differ
            self._counts[state] = Counter(value for _, value in passed.values())
        others = self._counts[state] - Counter([passed[without][1]] if without in passed else [])
        if len(others) < 2:
            return next(iter(others), None)  # equal returns give exactly their value
        return math.fsum(value * count for value, count in others.items()) / others.total()

    def turn_terms(self, rows: Sequence[Trajectory]) -> list[tuple[float | None, ...]]:
        """Compute gamma^(K-1-k) R - V(s_k) for each row's turns: None if V is unknown, () if the turns are unknown."""
        result = []
        for row, states in zip(rows, self._find_states(rows), strict=True):
            values = [self.value(state, without=row.id) for state in states or ()]
            pairs = zip(self._returns(row, len(values)), values, strict=True)
            result.append(tuple(None if value is None else earned - value for earned, value in pairs))
        return result

    def _returns(self, row: Trajectory, turns: int) -> list[float]:
        rewards = [self._gamma**left * row.record.reward for left in range(turns)]
        return rewards[::-1]

    def state(self) -> dict[str, dict[str, tuple[int, float]]]:
        """The visits, for a checkpoint; also of rows that the buffer no longer has."""
        return self._visits

    def load_state(self, visits: dict[str, dict[str, tuple[int, float]]]) -> None:
        self._counts.clear()
        self._visits = {s: {id: (at, value) for id, (at, value) in passed.items()} for s, passed in visits.items()}
