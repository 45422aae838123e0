"""Episodes that agents play against a policy which says what a function of the prompt says."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentloop.config import RunConfig
from agentloop.engines import Completion, GenerationFailed, GenerationRequest
from agentloop.environments import Task, load_environment
from agentloop.rollouts.episodes.episode import Episode
from agentloop.rollouts.episodes.run_episodes import run_episodes
from context.messages import Message
from tests.fakes.scripted import CHATML, LOG_PROB, scripted_actors

ROW = {"prompt": "What is the code?", "code": "78"}


class Policy:
    """Says what a function of the prompt's text says; counts how many it was asked at once."""

    policy_version = 3

    def __init__(self, says: Callable[[str], str | None]) -> None:
        self._says = says
        self.together: list[int] = []

    def begin(self, *, seed: int, temperature: float) -> None:
        return

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion | GenerationFailed]:
        self.together.append(len(requests))
        return [self._reply(request) for request in requests]

    def _reply(self, request: GenerationRequest) -> Completion | GenerationFailed:
        text = self._says(CHATML.codec.decode(request.prompt_ids))
        if text is None:
            return GenerationFailed("HTTP 500")
        ids = [*CHATML.codec.encode(text), CHATML.end_id][: request.max_new_tokens]
        return Completion(tuple(ids), (LOG_PROB,) * len(ids), 3, (1.0,) * len(ids))


def play(
    agent: str,
    says: Callable[[str], str | None],
    *,
    tasks: int = 1,
    template: str | None = None,
    options: Mapping[str, Any] = {},
    row: Mapping[str, Any] = {},
    context: Mapping[str, Any] = {},
    gateway: Mapping[str, Any] = {},
    **rollout: Any,
) -> tuple[list[Episode], Policy]:
    factory = load_environment("agent", {"agent": agent, **options}, row=ROW)
    policy = Policy(says)
    actors = replace(scripted_actors(factory, []), generator=policy, renderer=CHATML.renderer(template))
    config = RunConfig.model_validate(
        {
            "rollout": {"max_tokens_per_turn": 64, "episode_timeout_s": 60.0, **rollout},
            "context": {"max_tokens": 2000, **context},
            "gateway": gateway,
        }
    )
    given = [Task((Message("user", ROW["prompt"]),), {**ROW, **row})] * tasks
    return list(run_episodes(actors, given, config)), policy
