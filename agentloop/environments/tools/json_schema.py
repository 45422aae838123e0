"""Arguments that fit a JSON schema which somebody else wrote; needs the package `jsonschema`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any

from jsonschema.exceptions import SchemaError, best_match
from jsonschema.protocols import Validator
from jsonschema.validators import Draft202012Validator, validator_for
from pydantic import AfterValidator, TypeAdapter
from pydantic_core import PydanticCustomError

from agentloop.environments.tools.tool_schema import SCHEMA_ERROR
from agentloop.errors import UserError, one_line, shortened


def arguments_of(schema: Mapping[str, Any], where: str) -> TypeAdapter[dict[str, Any]]:
    """Checks arguments by `schema`. Raises UserError, about `where`, where it is none or lies in part elsewhere."""
    for reference in _references(schema):
        if not reference.startswith("#"):
            raise UserError(f"{where} must have a schema that is whole, got a reference to {reference!r}.")
    kind: type[Validator] = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise UserError(f"{where} must have a JSON schema, got {one_line(error)}. Leave it out.") from error
    return TypeAdapter(Annotated[dict[str, Any], AfterValidator(partial(_fitting, kind(schema)))])


def _references(part: Any) -> Iterator[str]:
    if isinstance(part, Mapping):
        for name, value in part.items():
            if name in ("$ref", "$dynamicRef") and isinstance(value, str):
                yield value
            yield from _references(value)
    elif isinstance(part, list):
        for value in part:
            yield from _references(value)


def _fitting(validator: Validator, arguments: dict[str, Any]) -> dict[str, Any]:
    error = best_match(validator.iter_errors(arguments))
    if error is not None:
        where = ".".join(map(str, error.absolute_path))
        problem = f"argument {where!r}: {error.message}" if where else error.message
        raise PydanticCustomError(SCHEMA_ERROR, "{problem}", {"problem": shortened(problem)})
    return arguments
