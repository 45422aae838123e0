"""Seconds to collect episodes whose tool takes its time: one call after another, and concurrently.

128 episodes of 5 calls to a tool that sleeps 50 ms. Replies are scripted, so that nothing but collecting is timed: the
prompts, the reading of replies, the tools and the records. `work`: the same with a tool that takes no time.
"""

import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from agentloop.config import RunConfig
from agentloop.environments import Environment, Task, load_environment, tool
from agentloop.rollouts.episodes.run_episodes import run_episodes
from context import Message
from tests.fakes.scripted import call, scripted_actors

EPISODES, CALLS, SLEEP_S = 128, 5, 0.05
GOALS = {"concurrent_speedup": ">= 40"}


class Waiting(Environment):
    """A tool that waits, as a search or a container does."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def make_task(self, rng: random.Random) -> Task:
        return Task("Look up what this is, who made it and where it is used.", {})

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        return 1.0

    @tool
    def wait(self) -> str:
        """Wait."""
        time.sleep(self._seconds)
        return "There are three pages on this: what it is, who made it, and where it is used today."


def seconds(*, threads: int, episodes: int = EPISODES, sleep_s: float = SLEEP_S) -> float:
    """Wall-clock of one collection."""
    factory = load_environment(f"{Path(__file__)}:Waiting", {"seconds": sleep_s})
    rollout, context = {"tool_threads": threads, "max_tokens_per_turn": 100}, {"max_tokens": 4096}
    config = RunConfig.model_validate({"rollout": rollout, "context": context})
    actors = scripted_actors(factory, [[*[call("wait")] * CALLS, "done"]] * episodes, concurrent=True)
    tasks = [factory.make_task(random.Random(0)) for _ in range(episodes)]
    began = time.perf_counter()
    ended = list(run_episodes(actors, tasks, config))
    taken = time.perf_counter() - began
    made = sum(episode.num_tool_calls for episode in ended)
    if made != episodes * CALLS or any(episode.error_kinds for episode in ended):
        raise RuntimeError(f"each episode must make {CALLS} calls that succeed, got {made} in all.")
    return taken


def measure(*, rounds: int = 3) -> dict[str, float]:
    found: dict[str, list[float]] = {"one_by_one": [], "concurrent": [], "work": []}
    for _ in range(rounds):
        found["one_by_one"].append(seconds(threads=1))
        found["concurrent"].append(seconds(threads=EPISODES))
        found["work"].append(seconds(threads=EPISODES, sleep_s=0))
    medians = {f"{name}_s": statistics.median(times) for name, times in found.items()}
    return {**medians, "concurrent_speedup": medians["one_by_one_s"] / medians["concurrent_s"]}


def main() -> dict[str, float]:
    print(f"collecting {EPISODES} episodes of {CALLS} calls to a tool that sleeps {SLEEP_S * 1e3:g} ms", flush=True)
    return measure()
