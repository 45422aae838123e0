"""The event loop of all MCP servers, in a thread of its own.

A server outlives the event loop of whoever asks it: an episode's, or that of a demonstration's single call.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar

_Result = TypeVar("_Result")


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()
    return loop


def submit(coroutine: Coroutine[Any, Any, _Result]) -> Future[_Result]:
    """Run it there. Cancelling the future cancels it."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop())
