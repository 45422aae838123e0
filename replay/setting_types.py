"""Types of settings, and the rules of a JSON schema in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class Section(BaseModel):
    """A frozen part of the configuration."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=(), hide_input_in_errors=True
    )

    def values_of(self, kind: type[Section]) -> dict[str, Any]:
        """The values of the keys of `kind`, which this section extends."""
        return {name: getattr(self, name) for name in kind.model_fields}


def alone(key: str) -> BeforeValidator:
    """A text is short for a section with that key and all defaults."""
    return BeforeValidator(lambda given: {key: given} if isinstance(given, str) else given)


def rule_in_words(schema: Mapping[str, Any]) -> str:
    """The rule of a JSON schema as the end of a sentence: `a number from 0 to 1`."""
    if "anyOf" in schema:
        return " or ".join(rule_in_words(part) for part in schema["anyOf"])
    if "enum" in schema:
        names = [str(name) for name in schema["enum"]]
        return ", ".join(names[:-1]) + " or " + names[-1]
    if "const" in schema:
        return str(schema["const"])
    if "$ref" in schema:  # an entry of a list
        return "a mapping"
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return _number_rule("a whole number" if kind == "integer" else "a number", schema)
    if kind == "array":
        return _array_rule(schema)
    text = f"text matching {schema['pattern']}" if "pattern" in schema else "text"
    return {"string": text, "boolean": "true or false", "null": "null", "object": "a mapping"}[str(kind)]


_BOUNDS = {"minimum": "of at least", "maximum": "of at most", "exclusiveMinimum": "above", "exclusiveMaximum": "below"}


def _number_rule(noun: str, schema: Mapping[str, Any]) -> str:
    if {"minimum", "maximum"} <= schema.keys():
        return f"{noun} from {schema['minimum']:g} to {schema['maximum']:g}"
    bounds = [f"{words} {_plain(schema[bound])}" for bound, words in _BOUNDS.items() if bound in schema]
    return f"{noun} {' and '.join(bounds)}".strip()


def _plain(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else f"{number:g}"


def _array_rule(schema: Mapping[str, Any]) -> str:
    if "prefixItems" in schema:
        parts = [rule_in_words(part) for part in schema["prefixItems"]]
        return f"a list of {len(parts)}: {', '.join(parts)}"
    rule = rule_in_words(schema["items"])
    plural = {"a mapping": "mappings", "a whole number": "whole numbers", "text": "texts"}
    return f"a list of {plural.get(rule, rule.replace('a list', 'lists', 1))}"
