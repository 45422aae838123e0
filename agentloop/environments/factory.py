"""Finds an environment by its name, checks it, and makes its instances."""

from __future__ import annotations

import ast
import hashlib
import inspect
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentloop.config.sections.environments import McpServerSection
from agentloop.environments.check import (
    check_class,
    check_options,
    check_repeatable,
    check_reward,
    check_task,
    reward_now,
    start_now,
)
from agentloop.environments.environment import Achieved, Environment, Task, observed_rewards, quoted_task
from agentloop.environments.lookup_chain import LookupChain
from agentloop.environments.row_environment import (
    AGENT,
    ROWS,
    AgentEnvironment,
    RowEnvironment,
    agent_function,
    rows_with_functions,
)
from agentloop.environments.tools.tool_schema import (
    ToolSpec,
    can_observe,
    schemas_of_task,
    tools_of,
    tools_of_task,
)
from agentloop.environments.tools.worker_threads import close_now
from agentloop.errors import UserError, needing
from agentloop.user_code import failing_as, file_of, is_given, load_class, load_function, text_of_given
from context.authors import LLM, Author
from context.messages import Message, content_hash, to_template
from context.wording import suggest

if TYPE_CHECKING:
    from agentloop.environments.mcp.attached import McpServers

BUILT_IN: Mapping[str, type[Environment]] = {AGENT: AgentEnvironment, "lookup_chain": LookupChain, ROWS: RowEnvironment}


@dataclass(frozen=True)
class EnvironmentFactory:
    """A checked environment class with its options."""

    name: str
    """The built-in name, or `file.py:Class` without folders, so that the name stays when the file moves."""
    version: str
    tools: tuple[dict[str, Any], ...]
    """One {"type": "function", "function": {...}} per tool."""
    where: str
    """The name of the class in errors."""
    environment: type[Environment]
    options: Mapping[str, Any]
    source: str
    """Digest of the files of the class and of its functions, with the files that they import from the same folder."""
    example: Task | None = None
    """One task of the environment; None only while the environment is being checked."""
    further_examples: tuple[Task, ...] = ()
    """One task for each further set of tools that tasks offer."""
    registered: tuple[Author, ...] = ()
    """Authors that the environment's messages may name besides `user` and `initialization`."""
    servers: McpServers | None = None
    """MCP servers that offer some of the tools; None: the class itself has all tools."""
    is_one_of_several: bool = False
    """True in a run with several environments, where `name` is the run's own, and each task and row carries it."""

    @property
    def agent(self) -> str | None:
        """The agent, a program or function that sends its own requests to the policy; None: the run plays the turns."""
        return self.options["agent"] if self.environment is AgentEnvironment else None

    def defines(self, *methods: str) -> bool:
        """True if the class overrides all of these methods of `Environment`."""
        return all(getattr(self.environment, name) is not getattr(Environment, name) for name in methods)

    def create(self) -> Environment:
        given = f"environment.options must be accepted by {self.where}, got {dict(self.options)} with"
        with failing_as(given, ". Change them, or mend __init__."):
            return self.environment(**self.options)

    def connected(self, environment: Environment) -> AbstractContextManager[Future[Any]]:
        """Connect the instance to MCP servers of its own, until the block ends. The yielded future waits for them."""
        if self.servers is not None:
            return self.servers.connected(environment)
        nothing = Future[Any]()
        nothing.set_result(None)
        return nullcontext(nothing)

    @contextmanager
    def started(self, task: Task) -> Iterator[Environment]:
        """Yield a new instance that was started with the task, outside of an episode, and close it afterwards."""
        environment = self.create()
        try:
            start_now(environment, task, self.where)
            yield environment
        finally:
            close_now(environment, self.where)

    def make_task(self, rng: random.Random) -> Task:
        """Make a task with a new instance, so that the task depends on nothing but `rng`."""
        return self._task("make_task", rng, rule="make a task")

    def task_from_row(self, row: Mapping[str, Any], place: str) -> Task:
        """Make the task of a row of the user's data with a new instance; `place` names the row in errors."""
        return self._task("task_from_row", row, rule="read every row", place=place)

    def _task(self, method: str, source: Any, *, rule: str, place: str = "") -> Task:
        make, found_in = getattr(self.create(), method), f" in {place}" if place else ""
        with failing_as(f"{self.where}.{method} must {rule}, got", f"{found_in}. Mend it."), _naming(place):
            task: Task = make(source)
        with _naming(place):
            check_task(task, f"{self.where}.{method}", self.registered)
            return self.labelled(task)

    def labelled(self, task: Task) -> Task:
        """Put into a task its own tools, if any, and its environment's name where a run has several environments."""
        if self.defines("tools_for"):
            with failing_as(
                f"{self.where}.tools_for must accept its tasks, got", f" for {quoted_task(task)}. Mend it."
            ):
                given = self.create().tools_for(task)
            if given is not None:
                is_row = issubclass(self.environment, RowEnvironment)
                where = "the column tools" if is_row else f"{self.where}.tools_for"
                task = replace(task, tools=schemas_of_task(self.environment, given, where))
        return replace(task, environment=self.name) if self.is_one_of_several else task

    def tools_for(self, task: Task) -> tuple[Mapping[str, Any], ...]:
        """Return the schemas of the tools that a task offers."""
        return self.tools if task.tools is None else task.tools

    def tool_specs(self, task: Task) -> Mapping[str, ToolSpec]:
        """Return the tools that a task offers, by name."""
        return tools_of_task(self.environment, task, self.where)

    def turn_rewards(self, task: Task, messages: Sequence[Message], *, replies: int) -> tuple[float, ...] | None:
        """Ask a new instance what each reply earned by itself; None: the environment has no rewards per reply."""
        place = f" for {quoted_task(task, messages)}. Mend it."
        with failing_as(f"{self.where}.turn_rewards must return a list of numbers, got", place):
            given = self.create().turn_rewards(task, messages)
            rewards = None if given is None else tuple(float(reward) for reward in given)
        if rewards is None:
            return observed_rewards(messages[len(task.messages()) :])
        if len(rewards) != replies or not all(map(math.isfinite, rewards)):
            raise UserError(
                f"{self.where}.turn_rewards must return one finite number per reply ({replies}), got {list(rewards)}. "
                "Mend it."
            )
        return rewards

    @property
    def all_examples(self) -> tuple[Task, ...]:
        """The known tasks that offer different tools."""
        return tuple(filter(None, (self.example, *self.further_examples)))

    @property
    def can_reward_replies(self) -> bool:
        """True if replies may have rewards of their own: from `turn_rewards`, or from observations."""
        return self.defines("turn_rewards") or can_observe(self.environment)

    @property
    def has_deterministic_tools(self) -> bool:
        specs = tools_of(self.environment).values()
        return bool(specs) and (self.environment.deterministic or any(spec.deterministic for spec in specs))

    def tools_hash(self, max_chars: int) -> str:
        """Hash all that tool answers depend on besides task and calls; `max_chars` of an answer are shown."""
        facts = {"name": self.name, "version": self.version, "source": self.source, "max_chars": max_chars}
        return content_hash({**facts, "options": {name: repr(value) for name, value in self.options.items()}})

    def achieved(self, task: Task, messages: Sequence[Message]) -> list[Achieved]:
        """Ask a new instance which other tasks a conversation solved."""
        turns = sum(message.author == LLM for message in messages)
        place = f" for {quoted_task(task, messages)}. Mend it."
        with failing_as(f"{self.where}.achieved must return a list of Achieved, got", place):
            found = list(self.create().achieved(task, messages))
            good = all(isinstance(one, Achieved) and 0 <= one.first_turn < turns for one in found)
        if not good:
            raise UserError(
                f"{self.where}.achieved must return a list of Achieved, each with a first_turn of 0 to {turns - 1}, "
                f"got {found!r:.200}. Mend it."
            )
        for one in found:
            check_task(one.task, f"{self.where}.achieved", self.registered)
        return [replace(one, task=self.labelled(one.task)) for one in found]

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        """Compute the reward of a conversation outside of an episode: a new instance is started and closed for it."""
        with self.started(task) as environment:
            return reward_now(environment, task, messages, self.where)

    def task_hash(self, task: Task) -> str:
        """Hash all that defines a task: its environment, opening messages, payload, and its hint and tools, if any."""
        return content_hash(
            {
                "environment": self.name,
                "version": self.version,
                "messages": [to_template(message) for message in task.messages()],
                "payload": task.payload,
                **({} if task.hint is None else {"hint": task.hint}),
                **({} if task.tools is None else {"tools": task.tools}),
            }
        )


def load_environment(
    name: str,
    options: Mapping[str, Any],
    registered: Sequence[Author] = (),
    *,
    row: Mapping[str, Any] | None = None,
    servers: Mapping[str, McpServerSection] | None = None,
    tools: Sequence[str] = (),
    answers: Mapping[str, str] | None = None,
    judges: Sequence[str] = (),
) -> EnvironmentFactory:
    """Load the environment `name`, built-in or `path/to/file.py:ClassName`, and try it out. Raises UserError.

    With a `row` of the user's data the environment must read tasks from rows; without one it must make them. `tools`
    are functions that the environment `rows` offers, `answers` are its functions `respond` and `call_tool`, and
    `judges` are the functions that decide success. All their files are part of the environment's source.
    """
    found = rows_with_functions(tools, answers or {}) if name == ROWS else _find(name)
    environment = check_class(found, name, reads_rows=row is not None)
    options = check_options(environment, options, name)
    attached = None
    if servers:
        with needing("mcp", "environment.mcp_servers"):  # imported here, because the import takes over a second
            from agentloop.environments.mcp.attached import McpServers
        attached = McpServers(servers)
        environment = attached.attached_to(environment, name)
    specs = tools_of(environment, name)
    agent = agent_function(options["agent"]) if environment is AgentEnvironment else None
    if agent is not None:
        load_function(agent, what="environment.agent")
    file = Path(inspect.getfile(BUILT_IN[name]) if name in BUILT_IN else name.rpartition(":")[0]).resolve()
    source = digest_of_functions(
        source_digest(file), tools=[*tools, *(answers or {}).values()], judges=judges, agent=agent
    )
    factory = EnvironmentFactory(
        name=name if name in BUILT_IN else f"{Path(name.rpartition(':')[0]).name}:{environment.__name__}",
        version=environment.version,
        tools=tuple(dict(spec.schema) for spec in specs.values()),
        where=name,
        environment=environment,
        options=options,
        source=source if attached is None else attached.digest(source),
        registered=tuple(registered),
        servers=attached,
    )

    def make(trial: int) -> Task:
        if row is None:
            return factory.make_task(random.Random(f"check/{trial}"))
        return factory.task_from_row(row, "the first row to train on")

    example = check_repeatable(make, name, reads_rows=row is not None)
    check_reward(factory.create(), example, name)
    return replace(factory, example=example)


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Begin an error with the row that has it; an empty `place` is no row."""
    try:
        yield
    except UserError as error:
        if not place:
            raise
        raise UserError(f"tasks.data, {place}: {error}") from error


def makes_tasks(name: str) -> bool:
    """True if the environment makes tasks itself, and so can demonstrate some; False where all tasks are rows."""
    return getattr(_find(name), "make_task", None) is not Environment.make_task


def _find(name: str) -> type:
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        raise UserError(
            f"environment.name must be a built-in environment or path/to/file.py:ClassName, got {name!r}. "
            f"{suggest(name, BUILT_IN)}"
        )
    return load_class(name, what="environment.name")


def digest_of_functions(own: str, *, tools: Sequence[str], judges: Sequence[str], agent: str | None = None) -> str:
    """Digest a class's `own` source together with the files of its functions."""
    specs = [(spec, "environment.tools") for spec in tools] + [(spec, "reward.functions") for spec in judges]
    specs += [] if agent is None else [(agent, "environment.agent")]
    # A function that was passed as an object has no file of its own; its name is unique, and a resume gives it again.
    files = [
        spec + text_of_given(spec) if is_given(spec) else source_digest(file_of(spec, what=what))
        for spec, what in specs
    ]
    return hashlib.sha256(repr([own, *files]).encode()).hexdigest() if specs else own


def source_digest(file: Path) -> str:
    """Digest a file and all files of its folder that it imports, directly or through one another."""
    found: dict[str, str] = {}
    waiting = [file]
    while waiting:
        path = waiting.pop()
        name = path.relative_to(file.parent).as_posix()
        if name not in found:
            content = path.read_bytes()
            found[name] = hashlib.sha256(content).hexdigest()
            waiting += [other for module in _imported(content) for other in _beside(file.parent, module)]
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def _imported(content: bytes) -> set[str]:
    """Find the names of the top-level modules that a source imports anywhere."""
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError):  # a package may hold a broken file that nothing imports
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names}


def _beside(folder: Path, module: str) -> list[Path]:
    """Find the module's file in the folder, or all files of the package; empty for a module from elsewhere."""
    file, package = folder / f"{module}.py", folder / module
    if (package / "__init__.py").is_file():
        return sorted(package.rglob("*.py"))
    return [file] if file.is_file() else []
