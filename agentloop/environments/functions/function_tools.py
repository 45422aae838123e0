"""Functions as the tools of the environment `rows`: the same schemas, checks and deadlines as methods with `@tool`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from agentloop.environments.environment import Environment
from agentloop.environments.functions.row_environment import RowEnvironment
from agentloop.environments.tools.tool_schema import ToolSpec, describe_function, with_tools
from agentloop.errors import UserError
from agentloop.user_code import load_function

_KEY = "environment.tools"


def rows_with_tools(names: Sequence[str]) -> type[Environment]:
    """`rows` with the functions of these `names` as its tools. Raises UserError for what can't be one."""
    tools: dict[str, ToolSpec] = {}
    for name in names:
        function = load_function(name, what=_KEY)
        spec, hidden = describe_function(function, f"{_KEY}: {name}")
        if spec.name in tools:
            raise UserError(f"{_KEY} must have names of their own, got {name}, named like another one. Rename it.")
        tools[spec.name] = replace(spec, function=_as_method(function, hidden))
    return with_tools(RowEnvironment, tools)


def _as_method(function: Callable[..., Any], hidden: Sequence[str]) -> Callable[..., Any]:
    """`hidden` arguments are given the episode's task."""

    def given(environment: RowEnvironment) -> dict[str, Any]:
        return dict.fromkeys(hidden, environment.task)

    if inspect.iscoroutinefunction(function):

        async def call_awaited(environment: RowEnvironment, /, **arguments: Any) -> Any:
            return await function(**arguments, **given(environment))

        return call_awaited

    def call(environment: RowEnvironment, /, **arguments: Any) -> Any:
        return function(**arguments, **given(environment))

    return call
