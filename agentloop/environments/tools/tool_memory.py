"""Calls of deterministic tools are answered by what an equal call answered before (as TVCache, arXiv 2602.10986)."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from agentloop.environments.environment import Environment
from agentloop.environments.tools.call import POLICY_ERRORS, ToolLimits, call_tool
from agentloop.environments.tools.results import ToolResult
from agentloop.environments.tools.tool_schema import tools_of
from agentloop.environments.tools.worker_threads import WorkerThreads
from context.messages import ToolCall, content_hash
from replay.records import ObservationRecord

_Run = Callable[[], Awaitable[ToolResult]]


def repeats(environment: type[Environment]) -> bool:
    """Whether the calls of an episode have the same answers in another one of its task."""
    specs = tools_of(environment).values()
    return bool(specs) and (environment.deterministic or all(spec.deterministic for spec in specs))


class ToolMemory:
    """What tools answered, for the episodes of one event loop; of equal calls at the same time one is run."""

    def __init__(self, *environments: str) -> None:
        """`environments`: see `ObservationRecord`."""
        self.environments = environments
        self._contents: dict[str, dict[str, str]] = {}
        """By task and id."""
        self._running: dict[str, asyncio.Event] = {}
        self._new: list[ObservationRecord] = []

    def add(self, known: Iterable[ObservationRecord]) -> None:
        for record in known:
            self._contents.setdefault(record.task, {})[record.id] = record.content

    def take_new(self) -> list[ObservationRecord]:
        """What has been answered for the first time since the last call."""
        taken, self._new = self._new, []
        return taken

    def keep(self, tasks: Collection[str]) -> None:
        """Forget what was answered for other tasks."""
        for task in self._contents.keys() - set(tasks):
            del self._contents[task]

    async def answer(self, asked: ObservationRecord, run: _Run) -> tuple[ToolResult, bool]:
        """The result of a call, and whether it was known; an error is not remembered. `asked` has no content yet."""
        while asked.id in self._running:
            await self._running[asked.id].wait()
        known = self._contents.get(asked.task, {}).get(asked.id)
        if known is not None:
            return ToolResult(known), True
        self._running[asked.id] = asyncio.Event()
        try:
            result = await run()
            if result.error_kind is None:
                record = replace(asked, content=result.content)
                self.add([record])
                self._new.append(record)
        finally:
            self._running.pop(asked.id).set()
        return result, False


@dataclass(frozen=True)
class TaskMemory:
    """A memory, for the episodes of one task by its hash, of one environment as `ObservationRecord` names it."""

    memory: ToolMemory
    task: str
    environment: str

    def asked(self, call: ToolCall, parent: str | None) -> ObservationRecord:
        """A call that has no answer yet. Raises ValueError for arguments that are no JSON."""
        arguments = dict(call.arguments)
        named = [self.environment, self.task, parent, call.name, arguments]
        return ObservationRecord(content_hash(named), self.task, self.environment, parent, call.name, arguments, "")


@dataclass
class EpisodeTools:
    """The tools of one episode: a call is run, or answered from memory."""

    environment: Environment
    limits: ToolLimits
    threads: WorkerThreads
    memory: TaskMemory | None = None
    before: str | None = None
    """The id of the last call that the environment's next answers depend on."""
    left_out: list[ToolCall] = field(default_factory=list)
    """Calls that were answered from memory, and that an environment with a state has still to make."""
    replayed: int = 0
    runs: int = 0
    """Calls that were run, those among them that were made up for."""
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    async def call(self, call: ToolCall) -> ToolResult:
        """Raises nothing that the tool or the policy did wrong."""
        kind = self._kind(call)
        if self.memory is None or kind is None:
            return await self._run(call)
        try:
            asked = self.memory.asked(call, self.before if kind == "environment" else None)
        except ValueError:  # NaN, which the tool does not take either
            return await self._run(call)
        result, was_known = await self.memory.memory.answer(asked, lambda: self._run(call))
        self.replayed += was_known
        if kind == "environment":
            if was_known:
                self.left_out.append(call)
            if result.error_kind is None:
                self.before = asked.id
            elif result.error_kind not in POLICY_ERRORS:
                self.memory = None  # nobody knows what it has changed
        return result

    def _kind(self, call: ToolCall) -> Literal["tool", "environment"] | None:
        """What says that a call's answer can be known: the tool, by its arguments; the environment, by all calls."""
        spec = tools_of(type(self.environment)).get(call.name)
        if spec is None or not isinstance(call.arguments, Mapping):
            return None
        if spec.deterministic:
            return "tool"
        return "environment" if self.environment.deterministic else None

    async def _run(self, call: ToolCall) -> ToolResult:
        if self._kind(call) == "environment":
            for left_out in self.left_out:
                await self._timed(left_out)
            self.left_out.clear()
        return await self._timed(call)

    async def _timed(self, call: ToolCall) -> ToolResult:
        self.runs += 1
        began = time.perf_counter()
        result = await call_tool(self.environment, call, self.limits, self.threads)
        if call.name in tools_of(type(self.environment)):  # others are what the policy made up
            self.seconds[call.name].append(time.perf_counter() - began)
        return result
