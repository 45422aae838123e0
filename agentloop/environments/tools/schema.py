"""A tool's JSON schema, from its signature and docstring; says in one line what its author got wrong."""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union
from weakref import WeakKeyDictionary

from pydantic import ConfigDict, TypeAdapter

from agentloop.environments.environment import Environment, tool_isolation
from agentloop.environments.tools.docstrings import Docstring, parse_docstring
from agentloop.errors import UserError
from context.wording import suggest

PARAMETER_TYPES = "str, int, float, bool, list[...], dict[str, ...], Literal[...] or one of these | None"
RESULT_TYPES = "str, int, float, bool, None, list[...] or dict[str, ...]"
_SCALARS: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
_TOOL_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class ToolSpec:
    """What is known about one tool of an environment class."""

    name: str
    schema: Mapping[str, Any]
    """As chat templates expect it: {"type": "function", "function": {...}}."""
    isolated: bool
    arguments: Mapping[str, TypeAdapter[Any]]
    """A strict validator per parameter."""
    required: tuple[str, ...]


_DESCRIBED: WeakKeyDictionary[type[Environment], Mapping[str, ToolSpec]] = WeakKeyDictionary()


def tools_of(environment: type[Environment]) -> Mapping[str, ToolSpec]:
    """The tools of an environment class by name."""
    if environment not in _DESCRIBED:
        where = f"{environment.__module__}:{environment.__qualname__}"
        _DESCRIBED[environment] = describe_tools(environment, where)
    return _DESCRIBED[environment]


def describe_tools(environment: type[Environment], where: str) -> Mapping[str, ToolSpec]:
    """The tools by name, base classes first, as ordered in the file; `where` names the class in errors."""
    names: dict[str, None] = {}
    for base in reversed(environment.__mro__):
        for name, member in vars(base).items():
            # A staticmethod or classmethod may carry the mark itself or on what it wraps.
            if tool_isolation(member) is None and tool_isolation(getattr(member, "__func__", None)) is None:
                continue
            if not inspect.isfunction(member):
                raise UserError(
                    f"{where}.{name} must be a plain method to be a tool, got a {type(member).__name__}. "
                    "Write def name(self, ...)."
                )
            names[name] = None
    methods = {name: getattr(environment, name) for name in names}
    return {
        name: _describe(method, name, f"{where}.{name}")
        for name, method in methods.items()
        if tool_isolation(method) is not None
    }


def _describe(method: Callable[..., Any], name: str, where: str) -> ToolSpec:
    if not _TOOL_NAME.fullmatch(name):
        raise UserError(f"{where} must be named in at most 64 of A-Z, a-z, 0-9 and _, got {name!r}. Rename it.")
    if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise UserError(f"{where} must be a plain method that returns its result, got an async or yielding one.")
    docstring = parse_docstring(method.__doc__)
    if not docstring.description:
        raise UserError(
            f"{where} must have a docstring that tells the model what the tool does, got none. "
            "Write one sentence below its def line."
        )
    parameters = _parameters(method, where)
    for documented in docstring.parameters:
        if documented not in parameters:
            raise UserError(
                f"{where} must document only arguments it has, got {documented!r} in its docstring. "
                f"{suggest(documented, parameters)}"
            )
    hints = _hints(method, where)
    _check_result(hints, where)
    properties = {p.name: _property(p, hints, docstring, where) for p in parameters.values()}
    required = [p.name for p in parameters.values() if p.default is inspect.Parameter.empty]
    function = {
        "name": name,
        "description": docstring.description,
        "parameters": {"type": "object", "properties": properties, "required": required},
    }
    return ToolSpec(
        name=name,
        schema={"type": "function", "function": function},
        isolated=bool(tool_isolation(method)),
        arguments={p: TypeAdapter(hints[p], config=_STRICT) for p in properties},
        required=tuple(required),
    )


def _parameters(method: Callable[..., Any], where: str) -> dict[str, inspect.Parameter]:
    every = list(inspect.signature(method).parameters.values())
    if not every or every[0].name != "self":
        raise UserError(f"{where} must take self first, got {inspect.signature(method)}.")
    for parameter in every[1:]:
        if parameter.kind not in _BY_NAME:
            raise UserError(
                f"{where} must take named arguments only, got {str(parameter)!r}. "
                "The model calls tools by argument name."
            )
        if parameter.annotation is inspect.Parameter.empty:
            raise UserError(
                f"{where} must annotate its argument {parameter.name!r}, got no type. Use {PARAMETER_TYPES}."
            )
    return {parameter.name: parameter for parameter in every[1:]}


def _hints(method: Callable[..., Any], where: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(method)
    except (NameError, TypeError, AttributeError, SyntaxError) as error:
        raise UserError(f"{where} must have annotations that can be resolved, got: {error}.") from error


def _check_result(hints: Mapping[str, Any], where: str) -> None:
    if "return" not in hints:
        raise UserError(f"{where} must annotate what it returns, got no type. Use -> {RESULT_TYPES}.")
    if _schema_of(hints["return"]) is None:
        raise UserError(
            f"{where} must return what can be shown to the model, got -> {type_name(hints['return'])}. "
            f"Use -> {RESULT_TYPES}."
        )


def _property(
    parameter: inspect.Parameter, hints: Mapping[str, Any], docstring: Docstring, where: str
) -> dict[str, Any]:
    schema = _schema_of(hints[parameter.name])
    if schema is None:
        raise UserError(
            f"{where} must annotate its argument {parameter.name!r} with a type JSON has, "
            f"got {type_name(hints[parameter.name])}. Use {PARAMETER_TYPES}."
        )
    if docstring.parameters.get(parameter.name):
        schema["description"] = docstring.parameters[parameter.name]
    if parameter.default is not inspect.Parameter.empty and parameter.default is not None:
        try:
            schema["default"] = json.loads(json.dumps(parameter.default, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{where} must have defaults JSON has, got {parameter.default!r} for {parameter.name!r}."
            ) from error
    return schema


def _schema_of(annotation: Any, *, nested: bool = False) -> dict[str, Any] | None:
    """The JSON schema of a type; None where JSON has no such type."""
    if annotation is None or (isinstance(annotation, type) and annotation in _SCALARS):
        return {"type": _SCALARS[annotation or type(None)]}
    if annotation is Any and nested:
        return {}
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is list or origin is list:
        return _container("array", "items", parts)
    if annotation is dict or origin is dict:
        return _container("object", "additionalProperties", parts[1:]) if not parts or parts[0] is str else None
    if origin is Literal:
        return _choice(parts)
    if origin in (Union, types.UnionType):
        options = [_schema_of(part, nested=nested) for part in parts]
        return {"anyOf": options} if None not in options else None
    return None


def _container(kind: str, key: str, parts: tuple[Any, ...]) -> dict[str, Any] | None:
    if not parts:
        return {"type": kind}
    inner = _schema_of(parts[0], nested=True)
    if inner is None:
        return None
    return {"type": kind, key: inner} if inner else {"type": kind}


def _choice(values: tuple[Any, ...]) -> dict[str, Any] | None:
    kinds = {_SCALARS.get(type(value)) for value in values}
    if None in kinds:
        return None
    return {"type": kinds.pop(), "enum": list(values)} if len(kinds) == 1 else {"enum": list(values)}


def type_name(annotation: Any) -> str:
    """A type as its author wrote it, without the module."""
    return annotation.__name__ if isinstance(annotation, type) and not typing.get_args(annotation) else str(annotation)
