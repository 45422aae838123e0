"""Measures how long the parts of a run take, and estimates the rest."""

import time
from collections.abc import Callable, Iterable

from agentloop.config import RunConfig
from agentloop.runs.display import duration


class Pace:
    """Measures this process's iterations, with their checkpoints, and its evaluations."""

    def __init__(self, config: RunConfig, *, iteration: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """`iteration` is the number of iterations that were made before."""
        self._config, self._before, self._clock = config, iteration, clock
        self._began = clock()
        self._evaluations: list[float] = []
        self._evaluated_since = 0.0
        self._per_episode = 0.0

    def begin(self) -> None:
        """Start the clock of the first iteration."""
        self._began, self._evaluated_since = self._clock(), 0.0

    def add_evaluation(self, seconds: float, *, episodes: int) -> None:
        self._evaluations.append(seconds)
        self._evaluated_since += seconds
        self._per_episode = seconds / episodes

    def is_evaluated(self, iteration: int) -> bool:
        """Whether held-out success is measured after this iteration."""
        every = self._config.evaluation.every
        return iteration == self._config.run.iterations or (every > 0 and iteration % every == 0)

    def seconds_left(self, iteration: int) -> float:
        """Estimate the seconds from the end of this iteration to the end of the run."""
        to_come = range(iteration + 1, self._config.run.iterations + 1)
        own = (self._clock() - self._began - self._evaluated_since) / (iteration - self._before)
        return own * len(to_come) + self._evaluation_seconds(to_come, iteration_s=own)

    def episodes_to_come(self) -> str:
        """Estimate, from the first evaluation, how long the run's episodes take, in words."""
        each, iterations = self._config.batch.trajectories, range(1, self._config.run.iterations + 1)
        seconds = self._per_episode * each * len(iterations) + self._evaluation_seconds(iterations)
        return (
            f"episodes will take about {duration(seconds)}, at this evaluation's {60 / self._per_episode:,.1f} per "
            f"minute ({len(iterations)} iterations of {each} at most, evaluations: "
            f"{sum(map(self.is_evaluated, iterations))}); updates come on top"
        )

    def _evaluation_seconds(self, iterations: Iterable[int], *, iteration_s: float = 0.0) -> float:
        """Estimate the seconds of evaluations, from earlier ones of this process, or from its iterations' episodes."""
        section, made = self._config.evaluation, self._evaluations
        guess = iteration_s * section.tasks * section.samples / self._config.batch.trajectories
        return (sum(made) / len(made) if made else guess) * sum(map(self.is_evaluated, iterations))


class PhaseClock:
    """Measures the seconds of each phase of one iteration."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self._laps[phase] = now - self._last
        self._last = now

    def metrics(self, *, tokens: int) -> dict[str, float]:
        laps, whole = {f"time/{phase}": seconds for phase, seconds in self._laps.items()}, sum(self._laps.values())
        return laps | {"time/iteration": whole, "speed/tokens_per_second": tokens / whole}
