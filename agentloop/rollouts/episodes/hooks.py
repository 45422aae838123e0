"""The environment's author's own methods around an episode: what they raise is the author's to mend."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentloop.config.sections.rollout import RolloutSection
from agentloop.environments import Environment, Task
from agentloop.environments.environment import quoted_task
from agentloop.environments.tools.worker_threads import WorkerThreads
from agentloop.errors import UserError
from agentloop.user_code import failing_as
from context import Message

_ADVICE = "Mend it and --resume: this iteration is collected again."


@dataclass
class EpisodeHooks:
    """`start`, `reward` and `close` of one instance; the first two raise UserError, the last never does."""

    environment: Environment
    task: Task
    threads: WorkerThreads
    limits: RolloutSection
    was_started: bool = False

    async def start(self) -> None:
        name = type(self.environment).__name__
        if type(self.environment).start is Environment.start:
            self.was_started = True
            return  # it does nothing
        starting = asyncio.ensure_future(self._called(self.environment.start, self.task))
        with failing_as(f"{name}.start must accept its tasks, got", f" for {quoted_task(self.task)}. {_ADVICE}"):
            try:
                await asyncio.shield(starting)
            except asyncio.CancelledError:
                # `close` comes next, which must not meet a start that is under way, or is yet to come.
                await asyncio.wait([starting], timeout=self.limits.tool_timeout_s)
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                raise

    async def reward(self, messages: Sequence[Message]) -> float:
        name, asked = type(self.environment).__name__, quoted_task(self.task, messages)
        with failing_as(f"{name}.reward must return a number, got", f" for {asked}. {_ADVICE}"):
            reward = float(await self._called(self.environment.reward, self.task, messages))
        if not math.isfinite(reward):
            raise UserError(f"{name}.reward must return a finite number, got {reward} for {asked}. {_ADVICE}")
        return reward

    async def close(self) -> str | None:
        """What went wrong, which costs nothing; None: nothing did."""
        if not self.was_started:
            return None
        return await self.threads.close_environment(self.environment, timeout_s=self.limits.tool_timeout_s)

    async def _called(self, method: Callable[..., Any], *args: Any) -> Any:
        call = method
        if inspect.iscoroutinefunction(method):
            self.was_started = True
        else:

            def call(*given: Any) -> Any:
                self.was_started = True  # only now: a place among the threads is waited for
                return method(*given)

        limit = self.limits.episode_timeout_s
        return await self.threads.ask(call, *args, timeout_s=limit, setting="rollout.episode_timeout_s")
