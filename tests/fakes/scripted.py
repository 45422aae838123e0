"""A policy that says what a test has written down, sampled from no model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentloop.engines import Completion, GenerationFailed, GenerationRequest, Generator
from agentloop.environments import EnvironmentFactory, RunEnvironments, Task
from agentloop.rollouts.actors import Actors
from agentloop.rollouts.episodes.episode import Episode
from context import HermesParser, default_authors
from tests.fakes import families as fakes

CHATML = fakes.family("chatml")
LOG_PROB = -0.5
CUT = "<cut>"


def call(name: str, arguments: str = "{}") -> str:
    """A tool call as the policy writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def chain_of(task: Task, key: str) -> list[str]:
    """The keys of a LookupChain's store from `key` along `next`."""
    store, keys = task.payload["store"], [key]
    while "next" in store[keys[-1]]:
        keys.append(store[keys[-1]]["next"])
    return keys


def shown(episode: Episode) -> list[str]:
    """What the tools of an episode answered."""
    return [message.content for message in episode.messages if message.role == "tool"]


class ScriptedGenerator:
    """Gives episode k the replies of `scripts[k]`, each with its end token; one that ends in CUT has none.

    What is no text is given as it is.
    """

    policy_version = 0

    def __init__(self, scripts: Sequence[Sequence[str | Completion | GenerationFailed]]) -> None:
        self._left = [list(script) for script in scripts]
        self.prompts: list[list[str]] = [[] for _ in scripts]
        """What each episode was shown before each of its replies, as text."""
        self.lengths: list[list[int]] = [[] for _ in scripts]
        """And in tokens."""

    def begin(self, *, seed: int, temperature: float) -> None:
        return

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion | GenerationFailed]:
        return [self._reply(request) for request in requests]

    def _reply(self, request: GenerationRequest) -> Completion | GenerationFailed:
        self.prompts[request.episode].append(CHATML.codec.decode(request.prompt_ids))
        self.lengths[request.episode].append(len(request.prompt_ids))
        text = self._left[request.episode].pop(0)
        if not isinstance(text, str):
            return text
        ids = list(CHATML.codec.encode_text(text.removesuffix(CUT)))
        ids = (ids if text.endswith(CUT) else [*ids, CHATML.end_id])[: request.max_new_tokens]
        return Completion(tuple(ids), (LOG_PROB,) * len(ids), 0, (1.0,) * len(ids))


class ConcurrentScriptedGenerator(ScriptedGenerator):
    """The same as an engine elsewhere."""

    async def reply(self, request: GenerationRequest) -> Completion:
        reply = self._reply(request)
        if isinstance(reply, GenerationFailed):
            raise reply
        return reply

    async def close(self) -> None:
        return None


def scripted_actors(
    factory: EnvironmentFactory, scripts: Sequence[Sequence[Any]], *, concurrent: bool = False, **given: Any
) -> Actors:
    """Who acts when a policy says what is written in `scripts`; `given` are further parts of the actors."""
    return Actors(
        RunEnvironments({factory.name: factory}),
        (ConcurrentScriptedGenerator if concurrent else ScriptedGenerator)(scripts),
        CHATML.renderer(authors=given.get("authors")),
        HermesParser(),
        **{"authors": default_authors(), "vocab_size": CHATML.codec.vocab_size, "parsers": HermesParser, **given},
    )


@dataclass
class FlakyGenerator:
    """Another generator behind a bad line: every `nth` reply is lost, or all of them once `dead`."""

    generator: Generator
    nth: int
    given: int = 0
    lost: int = 0
    dead: bool = False

    @property
    def policy_version(self) -> int:
        return self.generator.policy_version

    def begin(self, *, seed: int, temperature: float) -> None:
        self.generator.begin(seed=seed, temperature=temperature)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion | GenerationFailed]:
        if self.dead:
            raise GenerationFailed("connection refused")
        return [self._sent(reply) for reply in self.generator.generate(requests)]

    def _sent(self, reply: Completion | GenerationFailed) -> Completion | GenerationFailed:
        self.given += 1
        if self.given % self.nth:
            return reply
        self.lost += 1
        return GenerationFailed("HTTP 500")
