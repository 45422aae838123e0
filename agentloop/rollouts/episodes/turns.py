"""Who waits for whom: how the turns of many episodes follow each other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from agentloop.engines import (
    Completion,
    ConcurrentGenerator,
    GenerationFailed,
    GenerationRequest,
    Generator,
    recordable,
    replies,
)


class Turns(Protocol):
    """Gives episodes their replies, which can be recorded or failed."""

    async def ask(self, episode: int, prompt_ids: Sequence[int], max_new_tokens: int) -> Completion:
        """A reply. Raises GenerationFailed."""
        ...

    def ended(self) -> None:
        """One more episode asks for nothing."""
        ...

    async def close(self) -> None:
        """Nobody asks any more on this event loop."""
        ...


class ConcurrentTurns:
    """Each episode goes on as soon as its own reply is there."""

    def __init__(self, generator: ConcurrentGenerator, *, vocab_size: int) -> None:
        self._generator = generator
        self._vocab_size = vocab_size

    async def ask(self, episode: int, prompt_ids: Sequence[int], max_new_tokens: int) -> Completion:
        request = GenerationRequest(episode, prompt_ids, max_new_tokens)
        reply = recordable(request, await self._generator.reply(request), vocab_size=self._vocab_size)
        if isinstance(reply, GenerationFailed):
            raise reply
        return reply

    def ended(self) -> None:
        return

    async def close(self) -> None:
        await self._generator.close()


class TogetherTurns:
    """All running episodes take their turns together: one batch of replies when each has asked or ended.

    What is sampled does not depend on which tool was quicker.
    """

    def __init__(self, generator: Generator, *, episodes: int, vocab_size: int) -> None:
        self._generator = generator
        self._vocab_size = vocab_size
        self._running = episodes
        self._waiting: dict[int, tuple[GenerationRequest, asyncio.Future[Completion]]] = {}

    async def ask(self, episode: int, prompt_ids: Sequence[int], max_new_tokens: int) -> Completion:
        reply: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[episode] = GenerationRequest(episode, prompt_ids, max_new_tokens), reply
        self._answer_all()
        try:
            return await reply
        finally:
            self._waiting.pop(episode, None)

    def ended(self) -> None:
        self._running -= 1
        self._answer_all()

    async def close(self) -> None:
        return

    def _answer_all(self) -> None:
        if not self._waiting or len(self._waiting) < self._running:
            return
        asked = [self._waiting[episode] for episode in sorted(self._waiting)]
        self._waiting.clear()
        given = replies(self._generator, [request for request, _ in asked], vocab_size=self._vocab_size)
        for (_, future), reply in zip(asked, given, strict=True):
            if isinstance(reply, GenerationFailed):
                future.set_exception(reply)
            else:
                future.set_result(reply)
