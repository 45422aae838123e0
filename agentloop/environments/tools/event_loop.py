"""Where coroutines of acting run: an event loop of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from agentloop.environments.tools.silence import silenced_tools

_Result = TypeVar("_Result")


def run_coroutine(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Its result. Whoever calls may have an event loop running, as notebooks do."""
    results: list[_Result] = []

    async def stored() -> None:
        # asyncio writes out what a coroutine returns when it gives Ctrl-C back: long work where it is many episodes.
        results.append(await coroutine)

    with silenced_tools():
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run(stored())
            return results[0]
        with ThreadPoolExecutor(1) as pool:
            pool.submit(asyncio.run, stored()).result()
        return results[0]
