"""Where coroutines of acting run: an event loop of their own."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from agentloop.environments.tools.silence import silenced_tools

_Result = TypeVar("_Result")


def run_hook(hook: Callable[..., Any], *args: Any) -> Any:
    """What a method of the user's own returns, which may be `async def`, called here and now."""
    return run_coroutine(hook(*args)) if inspect.iscoroutinefunction(hook) else hook(*args)


async def run_to_end(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Its result. Who waits for it may be cancelled meanwhile: that comes once it has ended."""
    running = asyncio.ensure_future(coroutine)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return running.result()


def run_coroutine(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Its result. Whoever calls may have an event loop running, as notebooks do."""
    results: list[_Result] = []
    interrupts: list[BaseException] = []

    async def stored() -> None:
        try:
            # asyncio writes out what a coroutine returns when it gives Ctrl-C back: long work for many episodes.
            results.append(await coroutine)
        except (KeyboardInterrupt, SystemExit) as interrupt:
            interrupts.append(interrupt)  # asyncio would log that nobody asked this task for it

    with silenced_tools():
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run(stored())
        else:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(asyncio.run, stored()).result()
    if interrupts:
        raise interrupts[0]
    return results[0]
