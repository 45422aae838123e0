"""The environments `rows` and `agent`: each row of `tasks.data` is a task; the user's functions are its tools."""

import inspect
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentloop.environments.datasets import as_json
from agentloop.environments.environment import Environment, Task
from agentloop.environments.sandbox.bubblewrap import SandboxLimits
from agentloop.environments.sandbox.python_sandbox import SandboxKind, usable_interpreter
from agentloop.environments.tools.tool_schema import ToolSpec, describe_function, tool_name, tools_of, with_tools
from agentloop.errors import UserError
from agentloop.user_code import awaited_like, load_function, shown_name
from context.messages import Message
from context.wording import suggest

ROWS, AGENT = "rows", "agent"
"""The two names in `environment.name`."""
_TOOLS = "tools"
"""The column with a row's own tools."""
_ROLES = ("system", "user", "assistant")


class RowEnvironment(Environment):
    """Shows the policy one column of a row; the row is the payload, and the first of `reward.functions` scores."""

    def __init__(self, prompt: str = "prompt", system: str | None = None) -> None:
        """`prompt` names the column that is shown, a text or messages; `system` is a system message before it."""
        self._prompt = prompt
        self._system = system
        self.task: Task | None = None

    def task_from_row(self, row: Mapping[str, Any]) -> Task:
        if self._prompt not in row:
            raise UserError(
                f"environment.options.prompt must name a column that every row has, got {self._prompt!r} for one of "
                f"tasks.data with {', '.join(map(repr, row))}. {suggest(self._prompt, row)}"
            )
        messages = _messages(row[self._prompt], self._prompt)
        opening = () if self._system is None else (Message("system", self._system),)
        return Task((*opening, *messages), json.loads(json.dumps(dict(row), default=as_json)))

    def tools_for(self, task: Task) -> Sequence[str | Mapping[str, Any]] | None:
        """Read the column `tools`: names of functions or schemas, in a list or as JSON; the row offers these alone."""
        given = task.payload.get(_TOOLS)
        try:
            given = json.loads(given) if isinstance(given, str) else given
        except ValueError:
            raise UserError(f"the column {_TOOLS!r} must be a list or JSON of one, got {given!r:.100}.") from None
        own = tools_of(type(self))
        entries = given if isinstance(given, list) else [] if given is None else [given]
        names = [entry if isinstance(entry, str) else tool_name(entry) for entry in entries]
        offered: list[Any] = [name if name in own else entry for name, entry in zip(names, entries, strict=True)]
        return None if given is None else offered

    def start(self, task: Task) -> None:
        self.task = task

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        return 0.0


class AgentEnvironment(RowEnvironment):
    """The policy acts through an agent: a program or function that sends its requests to a base URL.

    The reward comes from the agent or from the first of `reward.functions`.
    """

    def __init__(
        self,
        agent: str,
        prompt: str = "prompt",
        *,
        sandbox: SandboxKind = "none",
        limits: SandboxLimits | None = None,
        read: tuple[str, ...] = (),
    ) -> None:
        """`agent` is a command or `path/to/file.py:function`; `prompt` names the column that pages show for a task.

        `limits` and `read` belong to the sandbox. Raises UserError where no sandbox can be made.
        """
        super().__init__(prompt)
        self.agent, self.read = agent, read
        self.limits: SandboxLimits | None = None
        if sandbox == "none" and (limits or read):
            raise UserError(
                "environment.options.sandbox must be bubblewrap for limits and read to hold, got none. Set it."
            )
        if sandbox != "none":
            if agent_function(agent):
                raise UserError(
                    "environment.options.sandbox must be none for a function, which runs in this program, "
                    f"got {sandbox}. Give a command."
                )
            usable_interpreter()
            self.limits = limits or SandboxLimits()

    def tools_for(self, task: Task) -> None:
        """Offer none: the agent brings its own tools."""

    def task_from_row(self, row: Mapping[str, Any]) -> Task:
        payload = json.loads(json.dumps(dict(row), default=as_json))
        shown = payload.get(self._prompt)
        return Task((Message("user", shown if isinstance(shown, str) else json.dumps(payload)),), payload)


def agent_function(agent: str) -> str | None:
    """Return the `path/to/file.py:name` of an agent that is a function; None for a command. Raises UserError."""
    try:
        words = shlex.split(agent)
    except ValueError as problem:
        raise UserError(f"environment.agent must be a command with its quotes closed, got {agent!r}.") from problem
    return words[0] if len(words) == 1 and ".py:" in words[0] else None


def _messages(shown: Any, column: str) -> tuple[Message, ...]:
    if isinstance(shown, str):
        return (Message("user", shown),)
    for message in shown if isinstance(shown, list) and shown else [shown]:
        given = {key for key in message if message[key] is not None} if isinstance(message, Mapping) else set()
        if given != {"role", "content"} or message["role"] not in _ROLES or not isinstance(message["content"], str):
            raise ValueError(
                f"the column {column!r} must be a text or a list of messages with a role ({', '.join(_ROLES)}), a "
                f"content and nothing else, got {message!r:.100}"
            )
    return tuple(Message(message["role"], message["content"]) for message in shown)


_KEY = "environment.tools"
_ANSWERS: Mapping[str, tuple[str, ...]] = {"respond": ("task", "messages"), "call_tool": ("task", "name", "arguments")}
"""The arguments of the functions that stand for methods of `Environment`."""


def rows_with_functions(names: Sequence[str], answers: Mapping[str, str]) -> type[Environment]:
    """Make the environment `rows` with the functions `names` as tools, and `answers` as `respond` or `call_tool`.

    Raises UserError for an unfit function.
    """
    tools: dict[str, ToolSpec] = {}
    for name in names:
        function = load_function(name, what=_KEY)
        spec, hidden = describe_function(function, f"{_KEY}: {shown_name(name)}")
        if spec.name in tools:
            raise UserError(
                f"{_KEY} must have names of their own, got {shown_name(name)}, named like another one. Rename it."
            )
        tools[spec.name] = replace(spec, function=_as_method(function, hidden))
    # Errors begin with the class's name and the method's, as the configuration's keys do.
    kind = type("environment", (RowEnvironment,), {name: _answer(name, spec) for name, spec in answers.items()})
    return with_tools(kind if answers else RowEnvironment, tools)


def _answer(name: str, spec: str) -> Callable[..., Any]:
    """Turn a function into the method `respond` or `call_tool`."""
    function, wanted = load_function(spec, what=f"environment.{name}"), _ANSWERS[name]
    try:
        inspect.signature(function).bind(*wanted)
    except TypeError as error:
        raise UserError(
            f"environment.{name} must take ({', '.join(wanted)}), got {shown_name(spec)} with {error}."
        ) from error

    def respond(environment: RowEnvironment, task: Task, messages: Sequence[Message]) -> Any:
        return function(task, messages)

    def call_tool(environment: RowEnvironment, tool: str, arguments: dict[str, Any]) -> Any:
        return function(environment.task, tool, arguments)

    return awaited_like(function, respond if name == "respond" else call_tool)


def _as_method(function: Callable[..., Any], hidden: Sequence[str]) -> Callable[..., Any]:
    """Turn a function into a method of the environment; its `hidden` arguments get the episode's task."""

    def call(environment: RowEnvironment, /, **arguments: Any) -> Any:
        return function(**arguments, **dict.fromkeys(hidden, environment.task))

    return awaited_like(function, call)
