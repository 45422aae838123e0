"""Answers a call of a deterministic tool with the result of an equal earlier call (as TVCache, arXiv 2602.10986).

If a tool is deterministic by itself, an equal call has the same task, tool and arguments. If the whole environment is
deterministic, all calls before it must be equal too. Example: after `add(1)` was answered from memory, the environment
has never added 1. So before the next call that has to run, `add(1)` is run first.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from agentloop.config.sections.rollout import RolloutSection
from agentloop.environments.environment import Environment
from agentloop.environments.tools.call import POLICY_ERRORS, Tools, call_tool
from agentloop.environments.tools.results import ToolResult
from agentloop.environments.tools.worker_threads import WorkerThreads
from context.messages import ToolCall, content_hash
from replay.records import ObservationRecord

_Run = Callable[[], Awaitable[ToolResult]]


class ToolMemory:
    """Remembers tool answers for the episodes of one event loop; if equal calls come at once, only one is run."""

    def __init__(self, *environments: str) -> None:
        """For `environments` see `ObservationRecord`."""
        self.environments = environments
        self._contents: dict[str, dict[str, str]] = {}
        """Answers by task and by id of the call."""
        self._running: dict[str, asyncio.Event] = {}
        self._new: list[ObservationRecord] = []

    def add(self, known: Iterable[ObservationRecord]) -> None:
        for record in known:
            self._contents.setdefault(record.task, {})[record.id] = record.content

    def take_new(self) -> list[ObservationRecord]:
        """Return the answers that were new since the last call of this method."""
        taken, self._new = self._new, []
        return taken

    def keep(self, tasks: Collection[str]) -> None:
        """Forget the answers for all other tasks."""
        for task in self._contents.keys() - set(tasks):
            del self._contents[task]

    async def answer(self, asked: ObservationRecord, run: _Run) -> tuple[ToolResult, bool]:
        """Return a call's result and whether it was known; `asked` has no content yet.

        Errors are not remembered, and neither are results with a reward or an end.
        """
        while asked.id in self._running:
            await self._running[asked.id].wait()
        known = self._contents.get(asked.task, {}).get(asked.id)
        if known is not None:
            return ToolResult(known), True
        self._running[asked.id] = asyncio.Event()
        try:
            result = await run()
            if result.error_kind is None and result.reward is None and not result.over:
                record = replace(asked, content=result.content)
                self.add([record])
                self._new.append(record)
        finally:
            self._running.pop(asked.id).set()
        return result, False


@dataclass
class EpisodeTools:
    """The tools of one episode: each call is run or answered from memory."""

    environment: Environment
    offered: Tools
    limits: RolloutSection
    threads: WorkerThreads
    memory: ToolMemory | None = None
    place: tuple[str, str] = ("", "")
    """The hashes by which the memory knows the task and its environment."""
    before: str | None = None
    """The id of the last call that changed the environment's state."""
    left_out: list[ToolCall] = field(default_factory=list)
    """Calls that were answered from memory, so that a deterministic environment's state does not show them yet."""
    replayed: int = 0
    runs: int = 0
    """Number of calls that were run, with those of `left_out` that were run later."""
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    async def call(self, call: ToolCall) -> ToolResult:
        """Answer a call; mistakes of the tool or the policy are results, and never raised."""
        kind = self._kind(call)
        if self.memory is None or kind is None:
            return await self._run(call)
        try:
            asked = self._asked(call, self.before if kind == "environment" else None)
        except ValueError:  # the arguments hold NaN, which the tool refuses
            return await self._run(call)
        result, was_known = await self.memory.answer(asked, lambda: self._run(call))
        self.replayed += was_known
        if kind == "environment":
            if was_known:
                self.left_out.append(call)
            if result.error_kind is None:
                self.before = asked.id
            elif result.error_kind not in POLICY_ERRORS:
                self.memory = None  # the failed call may have changed the state
        return result

    def _asked(self, call: ToolCall, parent: str | None) -> ObservationRecord:
        """Make the record of a call without its answer. Raises ValueError for arguments that are no JSON."""
        (task, environment), arguments = self.place, dict(call.arguments)
        named = [environment, task, parent, call.name, arguments]
        return ObservationRecord(content_hash(named), task, environment, parent, call.name, arguments, "")

    def _kind(self, call: ToolCall) -> Literal["tool", "environment"] | None:
        """Return which promise makes the call's answer known: the tool's, the whole environment's, or none."""
        spec = self.offered.get(call.name)
        if spec is None or not isinstance(call.arguments, Mapping):
            return None
        if spec.deterministic:
            return "tool"
        return "environment" if self.environment.deterministic else None

    async def before_response(self) -> None:
        """Run the calls that were answered from memory, so that `respond` finds the state that the policy was shown.

        A response may change the state, so later calls of a deterministic environment are run.
        """
        await self._catch_up()
        if self.environment.deterministic:
            self.memory = None

    async def _catch_up(self) -> None:
        for left_out in self.left_out:
            await self._timed(left_out)
        self.left_out.clear()

    async def _run(self, call: ToolCall) -> ToolResult:
        if self._kind(call) == "environment":
            await self._catch_up()
        return await self._timed(call)

    async def _timed(self, call: ToolCall) -> ToolResult:
        self.runs += 1
        began = time.perf_counter()
        result = await call_tool(self.environment, self.offered, call, limits=self.limits, threads=self.threads)
        if call.name in self.offered:  # the policy may invent other names
            self.seconds[call.name].append(time.perf_counter() - began)
        return result
