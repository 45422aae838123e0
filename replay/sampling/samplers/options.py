"""Options of samplers, checked against the dataclass that declares them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from context.wording import suggest
from replay.errors import first_problem


def checked_options(declared: type, given: Mapping[str, Any], *, sampler: str) -> Any:
    """An instance of the options class. Raises ValueError, of one line, for what it does not declare or allow."""
    kinds = _model(declared).model_fields
    unknown = next((name for name in given if name not in kinds), None)
    if unknown is not None:
        raise ValueError(
            f"replay.sampler_options must hold options of {sampler}, got {unknown!r}. {suggest(str(unknown), kinds)}"
        )
    try:
        _model(declared).model_validate(dict(given))
        return declared(**given)
    except ValidationError as error:
        place, rule, shown = first_problem(error)
        name = ".".join(map(str, ("replay.sampler_options", *place)))
        raise ValueError(f"{name} must {rule}, got {shown}.") from None
    except ValueError as error:
        raise ValueError(f"replay.sampler_options.{error}") from None


@cache
def _model(declared: type) -> type[BaseModel]:
    kinds = get_type_hints(declared, include_extras=True)
    columns: dict[str, Any] = {
        field.name: (kinds[field.name], ... if field.default is field.default_factory is MISSING else None)
        for field in fields(declared)
    }
    config = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True, protected_namespaces=())
    return create_model(declared.__name__, __config__=config, **columns)


def require(allowed: bool, name: str, rule: str, value: object) -> None:
    """For an options class to refuse a value: `name` must `rule`."""
    if not allowed:
        raise ValueError(f"{name} must {rule}, got {value!r}.")
