"""The end of an environment's instance: it frees what it holds, however its episode ended."""

from __future__ import annotations

import logging
from functools import cache

from agentloop.environments.environment import Environment
from agentloop.environments.tools.event_loop import run_hook
from agentloop.environments.tools.worker_threads import WorkerThreads
from agentloop.errors import CodeInterrupted, UserCodeFailed, UserError
from agentloop.user_code import users_code

_log = logging.getLogger(__name__)


async def close_environment(environment: Environment, threads: WorkerThreads, *, timeout_s: float) -> str | None:
    """Call its `close`, on the event loop or in one of `threads`; what went wrong, in words. None: nothing did."""
    if not _closes(environment):
        return None
    try:
        await threads.ask(environment.close, timeout_s=timeout_s, setting="rollout.tool_timeout_s")
    except (UserCodeFailed, UserError, CodeInterrupted) as problem:
        return str(problem)  # the caller counts and says it
    return None


def close_now(environment: Environment, where: str) -> None:
    """Call the `close` of an instance that played no episode of the policy; one that fails is warned of, once."""
    if not _closes(environment):
        return
    try:
        with users_code():
            run_hook(environment.close)
    except (UserCodeFailed, UserError, CodeInterrupted) as problem:
        warn_of_close(where, str(problem))  # what the instance was asked is known: it is not lost for that


def _closes(environment: Environment) -> bool:
    return type(environment).close is not Environment.close


@cache
def warn_of_close(where: str, problem: str) -> None:
    """Say it once."""
    _log.warning("%s.close must free what an episode holds, got %s. Mend it.", where, problem)
