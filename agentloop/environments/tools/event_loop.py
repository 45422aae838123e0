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
    with silenced_tools():
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(coroutine)
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, coroutine).result()
