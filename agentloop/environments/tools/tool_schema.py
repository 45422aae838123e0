"""Reads tools from signatures and docstrings: a JSON schema for the policy, and types that check its calls."""

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NotRequired, Union
from weakref import WeakKeyDictionary

import docstring_parser
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    PydanticUserError,
    TypeAdapter,
    with_config,
)
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import PydanticCustomError, to_jsonable_python
from typing_extensions import TypedDict

from agentloop.environments.environment import Environment, Observation, Task, tool_mark
from agentloop.errors import UserError, one_line, shortened
from agentloop.user_code import awaited_like
from context.wording import suggest

_PARAMETER_TYPES = "str, int, float, bool, list[...], dict[str, ...], Literal[...], Enum or one of these | None"
SCHEMA_ERROR = "json-schema"
"""Type of a validation error whose message can be shown as it is."""
_NO_TYPE = type("NoType", (), {})
_SCALARS = (str, int, float, bool, type(None))
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_TOOL_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
_TASKS_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_REFERENCE = re.compile(r'"\$(?:ref|dynamicRef)": "([^#"][^"]*)')


@dataclass(frozen=True)
class ToolSpec:
    name: str
    schema: Mapping[str, Any]
    """The form of chat templates: {"type": "function", "function": {...}}."""
    deterministic: bool
    arguments: TypeAdapter[dict[str, Any]]
    """Checks the arguments of a call strictly: text is no number."""
    function: Callable[..., Any]
    """Called with the environment as the first argument."""


_KNOWN: WeakKeyDictionary[type[Environment], Mapping[str, ToolSpec]] = WeakKeyDictionary()


def tools_of(environment: type[Environment], where: str = "") -> Mapping[str, ToolSpec]:
    """Return the tools by name, those of base classes first, in the file's order; `where` names the class in errors."""
    if environment not in _KNOWN:
        where = where or f"{environment.__module__}:{environment.__qualname__}"
        names = dict.fromkeys(name for base in reversed(environment.__mro__) for name in vars(base))
        members = {name: inspect.getattr_static(environment, name) for name in names}
        _KNOWN[environment] = {
            name: _describe(member, name, f"{where}.{name}")
            for name, member in members.items()
            if tool_mark(member) is not None
        }
    return _KNOWN[environment]


def can_observe(environment: type[Environment]) -> bool:
    """True if the environment may return an `Observation`, which can hold a reward."""
    answers = ("respond", "call_tool")
    functions = [spec.function for spec in tools_of(environment).values()]
    hints = [resolved_hints(function, "").get("return") for function in functions]
    return any(getattr(environment, name) is not getattr(Environment, name) for name in answers) or any(
        Observation in (hint, *typing.get_args(hint)) for hint in hints
    )


def tools_of_task(environment: type[Environment], task: Task, where: str) -> Mapping[str, ToolSpec]:
    """Return the tools that a task offers, by name: those of the class, or the task's own. Raises UserError."""
    if task.tools is None:
        return tools_of(environment, where)
    own, found = tools_of(environment, where), dict[str, ToolSpec]()
    for schema in task.tools:
        name = schema["function"]["name"]
        is_own = name in own and own[name].schema == schema
        found[name] = own[name] if is_own else _described_tool(environment, schema, f"{where}.tools_for: {name}")
    return found


def schemas_of_task(environment: type[Environment], given: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    """Return the schemas of the tools that were `given` for a task by `where`. Raises UserError."""
    rule = f"{where} must be a list of names of tools, or of schemas in OpenAI's form"
    own, found = tools_of(environment, where), dict[str, Mapping[str, Any]]()
    # The order of a set differs from process to process, and with it the task's hash.
    if isinstance(given, str | Mapping | set | frozenset) or not isinstance(given, Iterable):
        raise UserError(f"{rule}, got {shortened(repr(given))}.")
    for entry in given:
        name = entry if isinstance(entry, str) else tool_name(entry)
        if name is None:
            raise UserError(f'{rule}, got {shortened(repr(entry))}. Write {{"type": "function", "function": {{...}}}}.')
        if name in found:
            raise UserError(f"{rule}, got {name!r} twice. Leave one out.")
        if isinstance(entry, str):
            if name not in own:
                raise UserError(f"{rule}, got {name!r}, which is no tool of the class. {suggest(name, own)}")
            found[name] = own[name].schema
        else:
            try:
                found[name] = json.loads(json.dumps(entry, allow_nan=False))
            except (TypeError, ValueError) as error:
                raise UserError(f"{where}: {name} must have a JSON form, got {one_line(error)}.") from error
            _described_tool(environment, found[name], f"{where}: {name}")
            if environment.call_tool is Environment.call_tool:
                rule = f"{where} must name tools that are known while there is no call_tool"
                raise UserError(f"{rule}, got the schema of {name!r}. Write call_tool.")
    return tuple(found.values())


def tool_name(schema: Any) -> str | None:
    """Return the name in a schema of OpenAI's form; None for anything else."""
    function = schema.get("function") if isinstance(schema, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _described_tool(environment: type[Environment], schema: Mapping[str, Any], where: str) -> ToolSpec:
    """Describe a tool that a schema alone defines, and that the environment's `call_tool` answers."""
    name = schema["function"]["name"]
    if not _TASKS_TOOL_NAME.fullmatch(name):
        raise UserError(f"{where} must be named in at most 64 of A-Z, a-z, 0-9, _, . and -, got {name!r}. Rename it.")
    parameters = schema["function"].get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise UserError(f"{where} must have parameters that are a JSON schema, got {shortened(repr(parameters))}.")

    def call(environment: Environment, /, **arguments: Any) -> Any:
        return environment.call_tool(name, arguments)

    function = awaited_like(environment.call_tool, call)
    return ToolSpec(name, schema, False, arguments_of(parameters, where), function)


def with_tools(environment: type[Environment], specs: Mapping[str, ToolSpec]) -> type[Environment]:
    """Make a class with further tools. Nobody promises that these are deterministic, so the new class is not either."""
    known = {"__module__": environment.__module__, "__qualname__": environment.__qualname__, "deterministic": False}
    extended = type(environment.__name__, (environment,), known)
    _KNOWN[extended] = {**tools_of(environment), **specs}
    return extended


def _describe(method: Any, name: str, where: str) -> ToolSpec:
    if not inspect.isfunction(method):
        kind = type(method).__name__
        raise UserError(f"{where} must be a plain method to be a tool, got a {kind}. Write def name(self, ...).")
    every = list(inspect.signature(method).parameters.values())
    if not every or every[0].name != "self":
        raise UserError(f"{where} must take self first, got {inspect.signature(method)}.")
    return _spec(method, name, where, every[1:])


def describe_function(function: Callable[..., Any], where: str) -> tuple[ToolSpec, tuple[str, ...]]:
    """Describe a function as a tool, with the names of its arguments of type `Task`, which the policy does not see."""
    hints = resolved_hints(function, where)
    every = inspect.signature(function).parameters.values()
    hidden = tuple(parameter.name for parameter in every if hints.get(parameter.name) is Task)
    shown = [parameter for parameter in every if parameter.name not in hidden]
    return _spec(function, function.__name__, where, shown), hidden


def _spec(function: Callable[..., Any], name: str, where: str, shown: Sequence[inspect.Parameter]) -> ToolSpec:
    """Describe a tool; `shown` are the parameters that the policy fills in."""
    if not _TOOL_NAME.fullmatch(name):
        raise UserError(f"{where} must be named in at most 64 of A-Z, a-z, 0-9 and _, got {name!r}. Rename it.")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UserError(f"{where} must return its result, got one that yields.")
    for parameter in shown:
        if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            raise UserError(f"{where} must take named arguments only, got {str(parameter)!r}. Models call by name.")
    description, descriptions = _documented(function, where)
    hints = resolved_hints(function, where)
    fields = {p.name: _field(p, hints.get(p.name, _NO_TYPE), descriptions.get(p.name), where) for p in shown}
    arguments = TypeAdapter(with_config(_STRICT)(TypedDict(name, fields)))  # type: ignore[operator]
    schema = _inlined(arguments.json_schema(schema_generator=_ToolSchema))
    inputs = {"type": "object", "properties": schema["properties"], "required": schema.get("required", [])}
    described = {"name": name, "description": description, "parameters": inputs}
    is_deterministic = bool(tool_mark(function))
    return ToolSpec(name, {"type": "function", "function": described}, is_deterministic, arguments, function)


def _documented(method: Callable[..., Any], where: str) -> tuple[str, dict[str, str]]:
    """Read the descriptions of the tool (its docstring's first paragraph) and of its arguments, on one line each."""
    try:
        docstring = docstring_parser.parse(method.__doc__ or "")
    except Exception as error:  # the parser raises various errors for malformed docstrings
        raise UserError(
            f"{where} must have a docstring in the style of Google, reST or NumPy, got one that can't be read "
            f"({one_line(error)}). Describe its arguments under Args:"
        ) from error
    description = " ".join((docstring.description or "").partition("\n\n")[0].split())
    if not description:
        rule = f"{where} must have a docstring that says what the tool does"
        raise UserError(f"{rule}, got none. Write one sentence below its def line.")
    every = inspect.signature(inspect.unwrap(method)).parameters  # also those that the policy is not shown
    names = [name for name in every if name != "self"]
    for entry in docstring.params:
        if entry.arg_name not in names:
            raise UserError(
                f"{where} must document only arguments it has, got {entry.arg_name!r} in its docstring. "
                f"{suggest(entry.arg_name, names)}"
            )
    described = {entry.arg_name: " ".join(entry.description.split()) for entry in docstring.params if entry.description}
    return description, described


def resolved_hints(method: Callable[..., Any], where: str) -> dict[str, Any]:
    """Return the types of a function's arguments and result by name. Raises UserError for an unknown type."""
    try:
        return typing.get_type_hints(method, include_extras=True)
    except (NameError, TypeError, AttributeError, SyntaxError) as error:
        raise UserError(f"{where} must have annotations that can be resolved, got: {error}.") from error


def _field(parameter: inspect.Parameter, hint: Any, description: str | None, where: str) -> Any:
    shown: Any = hint if _is_json(hint) else Annotated[Json[hint], BeforeValidator(json.dumps)]  # type: ignore[misc]
    try:
        _inlined(TypeAdapter(shown).json_schema(schema_generator=_ToolSchema))
    except (PydanticUserError, RecursionError) as error:
        raise UserError(
            f"{where} must annotate its argument {parameter.name!r} with a type JSON has, "
            f"got {'no type' if hint is _NO_TYPE else inspect.formatannotation(hint)}. Use {_PARAMETER_TYPES}."
        ) from error
    # The docstring's description comes before one in the annotation.
    described: dict[str, Any] = {} if description is None else {"description": description}
    if parameter.default is inspect.Parameter.empty:
        return Annotated[shown, Field(**described)]
    try:
        default = json.loads(json.dumps(parameter.default, allow_nan=False, default=to_jsonable_python))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{where} must have defaults JSON has, got {parameter.default!r} for {parameter.name!r}."
        ) from error
    extra = None if default is None else {"default": default}
    return NotRequired[Annotated[shown, Field(json_schema_extra=extra, **described)]]


def _inlined(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Put definitions in the place of references, which chat templates would print as they are."""
    definitions = {f"#/$defs/{name}": found for name, found in schema.get("$defs", {}).items()}

    def whole(part: Any) -> Any:
        if isinstance(part, list):
            return [whole(each) for each in part]
        if not isinstance(part, dict):
            return part
        named = {key: value for key, value in definitions.get(part.get("$ref", ""), {}).items() if key != "title"}
        return {key: whole(value) for key, value in (named | part).items() if key not in ("$ref", "$defs")}

    return whole(schema) if definitions else dict(schema)


def _is_json(annotation: Any) -> bool:
    """True if JSON has the type, so that the tool gets exactly the value that the model wrote."""
    origin, parts = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if origin is Annotated:
        return _is_json(parts[0])
    if origin is Literal:
        return all(type(value) in _SCALARS for value in parts)
    if origin in (Union, types.UnionType, list):
        return all(map(_is_json, parts))
    if origin is dict and parts:
        return parts[0] is str and _is_json(parts[1])
    return origin in (None, dict, Any, *_SCALARS)


class _ToolSchema(GenerateJsonSchema):
    """Makes JSON schemas in the form of chat templates: without titles, and with every choice as `enum`."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def json_schema(self, schema: Any) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])  # not of a text with JSON, which is `json.dumps` alone

    def literal_schema(self, schema: Any) -> JsonSchemaValue:
        found = super().literal_schema(schema)
        choices = found.pop("enum", None) or [found.pop("const")]
        return {**found, "enum": choices}

    def sort(self, value: JsonSchemaValue, parent_key: str | None = None) -> JsonSchemaValue:
        """Keep the order of keys: type, description, default."""
        return value


def arguments_of(schema: Mapping[str, Any], where: str) -> TypeAdapter[dict[str, Any]]:
    """Make a check of arguments from a JSON schema. Raises UserError, about `where`, for an unusable schema."""
    if elsewhere := _REFERENCE.search(json.dumps(schema)):
        raise UserError(f"{where} must have a schema that is whole, got a reference to {elsewhere[1]!r}.")
    from jsonschema.exceptions import SchemaError  # here: only servers' tools need the package
    from jsonschema.validators import Draft202012Validator, validator_for

    kind: Any = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise UserError(f"{where} must have a JSON schema, got {one_line(error)}. Leave it out.") from error
    return TypeAdapter(Annotated[dict[str, Any], AfterValidator(partial(_fitting, kind(schema)))])


def _fitting(validator: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    from jsonschema.exceptions import best_match

    error = best_match(validator.iter_errors(arguments))
    if error is not None:
        where = ".".join(map(str, error.absolute_path))
        problem = f"argument {where!r}: {error.message}" if where else error.message
        raise PydanticCustomError(SCHEMA_ERROR, "{problem}", {"problem": shortened(problem)})
    return arguments
