"""Replies of an engine elsewhere to many requests at once, for tests that run no event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agentloop.engines import Completion, ConcurrentGenerator, GenerationFailed, GenerationRequest


def replies_of(
    engine: ConcurrentGenerator, requests: Sequence[GenerationRequest]
) -> list[Completion | GenerationFailed]:
    """One per request, in their order."""

    async def one(request: GenerationRequest) -> Completion | GenerationFailed:
        try:
            return await engine.reply(request)
        except GenerationFailed as failure:
            return failure

    async def everything() -> list[Completion | GenerationFailed]:
        try:
            return list(await asyncio.gather(*map(one, requests)))
        finally:
            await engine.close()

    return asyncio.run(everything())
