"""Held-out success: the same new tasks each time, sampled with the same seed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from agentloop.collect import Actors, Progress, run_episodes, succeeded, whole
from agentloop.config import RunConfig
from agentloop.environments import TaskSource
from agentloop.seeds import derive_seed


@dataclass(frozen=True)
class Evaluation:
    success: float
    """Share of tasks solved."""
    tasks: int
    mean_reward: float
    mean_turns: float
    engine_failures: int
    """Tasks that are left out, as the engine failed: whether they would have been solved is unknown."""

    @property
    def margin(self) -> float:
        """Half-width of the 95 % confidence interval (normal approximation)."""
        return 1.96 * math.sqrt(self.success * (1.0 - self.success) / self.tasks)

    def metrics(self) -> dict[str, float]:
        return {
            "eval/success": self.success,
            "eval/reward": self.mean_reward,
            "eval/turns": self.mean_turns,
            "eval/engine_failures": self.engine_failures,
        }


def evaluate(actors: Actors, source: TaskSource, config: RunConfig, *, progress: Progress | None = None) -> Evaluation:
    """One episode on each held-out task. Touches neither the buffer nor the training tasks."""
    tasks = source.held_out(config.evaluation.tasks)
    actors.generator.begin(seed=derive_seed(config.run.seed, "evaluate"), temperature=config.evaluation.temperature)
    everything = list(run_episodes(actors, tasks, config, progress=progress))
    episodes = whole(everything)
    return Evaluation(
        success=sum(succeeded(e, config) for e in episodes) / len(episodes),
        tasks=len(episodes),
        mean_reward=sum(e.reward for e in episodes) / len(episodes),
        mean_turns=sum(e.num_turns for e in episodes) / len(episodes),
        engine_failures=len(everything) - len(episodes),
    )
