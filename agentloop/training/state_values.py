"""Values of the states that a run's trajectories passed, as baselines of single turns."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import islice

from agentloop.records import TurnStates
from replay.records import Trajectory


class StateValues:
    """V(s): the mean discounted return of a run's recent trajectories that passed s, each once.

    GiGPO (Feng et al. 2025, arXiv 2505.10978) and RTMC (arXiv 2604.11037) compare trajectories of one batch by states.

    The return of a trajectory of K turns from its turn k (0, 1, ..) on is gamma^(K-1-k) R, with R its stored reward;
    where it passes a state twice, that of the first visit counts. A restarted trajectory was led through the states
    before its own first reply: what it earned says nothing of these.

    What is biased. V is no value of the present policy: the trajectories are those of several, and states that look
    alike may differ in what came before them. As a baseline it adds no bias all the same: the state is a function of
    what came before the reply, and the trajectory itself is left out, so nothing of V depends on the reply, and
    E[V grad log pi(reply | all before it)] = 0. That holds for fresh rows. Part of what a *replayed* row is compared
    with was sampled by policies that had learned from it: there it holds only as far as one row did not move them.
    """

    def __init__(self, find_states: TurnStates, *, gamma: float, max_age: int | None) -> None:
        """A trajectory counts for `max_age` iterations after the one it was added in; None: for ever."""
        self._find_states, self._gamma, self._max_age = find_states, gamma, max_age
        self._visits: dict[str, dict[str, tuple[int, float]]] = {}
        """(iteration, return) by state and trajectory id."""
        self._counts: dict[str, Counter[float]] = {}
        """How often each return was had, of states that were asked for since the visits changed."""

    def add(self, rows: Sequence[Trajectory], *, iteration: int) -> None:
        """Count an iteration's fresh rows, and those no more that are too old by now."""
        self._counts.clear()
        if self._max_age is not None:
            oldest = iteration - self._max_age
            young = {s: {id: v for id, v in passed.items() if v[0] >= oldest} for s, passed in self._visits.items()}
            self._visits = {state: passed for state, passed in young.items() if passed}
        for row, states in zip(rows, self._find_states(rows), strict=True):
            passed = zip(states or (), self._returns(row, len(states or ())), strict=True)
            for state, value in islice(passed, row.record.kept_turns or 0, None):
                self._visits.setdefault(state, {}).setdefault(row.id, (iteration, value))

    def value(self, state: str, *, without: str) -> float | None:
        """V of a state without one trajectory; None where no other passed it."""
        passed = self._visits.get(state, {})
        if state not in self._counts:  # many rows ask of one state, and few returns differ
            self._counts[state] = Counter(value for _, value in passed.values())
        others = self._counts[state] - Counter([passed[without][1]] if without in passed else [])
        if len(others) < 2:
            return next(iter(others), None)  # of equal returns exactly their value
        return math.fsum(value * count for value, count in others.items()) / others.total()

    def turn_terms(self, rows: Sequence[Trajectory]) -> list[tuple[float | None, ...]]:
        """gamma^(K-1-k) R - V(s_k) of each turn of each row; None where V is not known, () where the turns are not."""
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
        """What a checkpoint has of it: of this run's rows, whether the buffer still has them or not."""
        return self._visits

    def load_state(self, visits: dict[str, dict[str, tuple[int, float]]]) -> None:
        self._counts.clear()
        self._visits = {s: {id: (at, value) for id, (at, value) in passed.items()} for s, passed in visits.items()}
