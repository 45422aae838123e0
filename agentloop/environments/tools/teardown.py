"""The end of an environment's instance: it frees what it holds, however its episode ended."""

from __future__ import annotations

import asyncio
import inspect
import logging
from functools import cache

from agentloop.environments.environment import Environment
from agentloop.environments.tools.event_loop import run_hook
from agentloop.environments.tools.results import ToolTimeout
from agentloop.environments.tools.worker_threads import WorkerThreads
from agentloop.errors import one_line_with_place

_log = logging.getLogger(__name__)


async def close_environment(environment: Environment, threads: WorkerThreads, *, timeout_s: float) -> str | None:
    """Call its `close`, on the event loop or in one of `threads`; what went wrong, in words. None: nothing did."""
    if not _closes(environment):
        return None
    try:
        if inspect.iscoroutinefunction(environment.close):
            async with asyncio.timeout(timeout_s):
                await environment.close()
        else:
            await threads.run(environment.close, timeout_s=timeout_s)
    except (ToolTimeout, TimeoutError):
        return f"no end within rollout.tool_timeout_s={timeout_s:g} s"
    except Exception as error:  # noqa: BLE001  the caller counts and says it
        return one_line_with_place(error)
    return None


def close_now(environment: Environment, where: str) -> None:
    """Call the `close` of an instance that played no episode of the policy; one that fails is warned of, once."""
    if not _closes(environment):
        return
    try:
        run_hook(environment.close)
    except Exception as error:  # noqa: BLE001  what the instance was asked is known: it is not lost for that
        warn_of_close(where, one_line_with_place(error))


def _closes(environment: Environment) -> bool:
    return type(environment).close is not Environment.close


@cache
def warn_of_close(where: str, problem: str) -> None:
    """Say it once."""
    _log.warning("%s.close must free what an episode holds, got %s. Mend it.", where, problem)
