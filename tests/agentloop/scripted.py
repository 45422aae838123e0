"""A policy that says what a test has written down, sampled from no model."""

from __future__ import annotations

from collections.abc import Sequence

from agentloop.generation import Completion, GenerationRequest
from tests.context import fakes

CHATML = fakes.family("chatml")
LOG_PROB = -0.5
CUT = "<cut>"


def call(name: str, arguments: str = "{}") -> str:
    """A tool call as the policy writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class ScriptedGenerator:
    """Gives episode k the replies of `scripts[k]`, each with its end token; one that ends in CUT has none."""

    policy_version = 0

    def __init__(self, scripts: Sequence[Sequence[str]]) -> None:
        self._left = [list(script) for script in scripts]
        self.prompts: list[list[str]] = [[] for _ in scripts]
        """What each episode was shown before each of its replies, as text."""

    def begin(self, *, seed: int, temperature: float) -> None:
        return

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        return [self._reply(request) for request in requests]

    def _reply(self, request: GenerationRequest) -> Completion:
        self.prompts[request.episode].append(CHATML.codec.decode(request.prompt_ids))
        text = self._left[request.episode].pop(0)
        ids = list(CHATML.codec.encode_text(text.removesuffix(CUT)))
        ids = (ids if text.endswith(CUT) else [*ids, CHATML.end_id])[: request.max_new_tokens]
        return Completion(tuple(ids), (LOG_PROB,) * len(ids), (1.0,) * len(ids))
