"""Seconds to collect episodes whose tool takes its time: one call after another, and concurrently.

128 episodes of 5 calls to a tool that sleeps 50 ms. Replies are scripted, so that nothing but collecting is timed: the
prompts, the reading of replies, the tools and the records. `work`: the same with a tool that takes no time.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from agentloop.config import RunConfig
from agentloop.engines import Completion, GenerationRequest
from agentloop.environments import Environment, EnvironmentFactory, RunEnvironments, Task, load_environment, tool
from agentloop.models.tiny import END_OF_TURN, build_tokenizer
from agentloop.rollouts.actors import Actors
from agentloop.rollouts.episodes.run_episodes import run_episodes
from benchmarks._goals import show
from context import ChatTemplate, HermesParser, Message, Renderer, TokenCodec, default_authors

EPISODES, CALLS, SLEEP_S = 128, 5, 0.05
GOALS = {"concurrent_speedup": ">= 40"}
_CALL = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
_RESULT = "There are three pages on this: what it is, who made it, and where it is used today."


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
        return _RESULT


class _Scripted:
    """Calls the tool in every reply but the last one."""

    policy_version = 0

    def __init__(self, codec: TokenCodec, stop: int) -> None:
        self._call, self._answer = ([*codec.encode(text), stop] for text in (_CALL, "done"))
        self._asked: dict[int, int] = {}

    def begin(self, *, seed: int, temperature: float) -> None:
        self._asked = {}

    def _reply(self, request: GenerationRequest) -> Completion:
        turn = self._asked.get(request.episode, 0)
        self._asked[request.episode] = turn + 1
        ids = self._answer if turn == CALLS else self._call
        return Completion(tuple(ids), (-0.5,) * len(ids), 0)

    async def reply(self, request: GenerationRequest) -> Completion:
        return self._reply(request)

    async def close(self) -> None:
        return


def actors(factory: EnvironmentFactory) -> Actors:
    frame = [json.dumps(tool["function"]) for tool in factory.tools] + [
        _CALL,
        _RESULT,
        "done. Look up what this is, who made it and where it is used.",
    ]
    tokenizer = build_tokenizer(frame * 50, vocabulary=400)
    codec = TokenCodec(tokenizer.backend_tokenizer.to_str())
    stop = codec.token_id(END_OF_TURN)
    assert stop is not None
    template = ChatTemplate(str(tokenizer.chat_template), {})
    renderer = Renderer(codec, template, authors=default_authors(), stop_ids=frozenset([stop]))
    generator = _Scripted(codec, stop)
    return Actors(
        RunEnvironments.of_one(factory), generator, renderer, HermesParser(), default_authors(), codec.vocab_size
    )


def seconds(*, threads: int, episodes: int = EPISODES, sleep_s: float = SLEEP_S) -> float:
    """Wall-clock of one collection."""
    factory = load_environment(f"{Path(__file__)}:Waiting", {"seconds": sleep_s})
    config = RunConfig.model_validate({"rollout": {"tool_threads": threads, "max_tokens_per_turn": 100}})
    playing = actors(factory)
    tasks = [factory.make_task(random.Random(0)) for _ in range(episodes)]
    playing.generator.begin(seed=0, temperature=1.0)
    began = time.perf_counter()
    ended = list(run_episodes(playing, tasks, config))
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
    found = measure()
    show(found, GOALS)
    return found


if __name__ == "__main__":
    print(json.dumps(main()), file=sys.stderr)
