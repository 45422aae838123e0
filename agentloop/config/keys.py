"""Every configuration key with its rule, default and meaning, read off `RunConfig` itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from agentloop.config import RunConfig
from agentloop.config.model_defaults import MODEL_DEFAULTS


@dataclass(frozen=True)
class Key:
    """One leaf of the configuration."""

    path: tuple[str, ...]
    rule: str
    """What a value must be, as the end of a sentence: `a number from 0 to 1`."""
    default: Any
    """With the built-in model."""
    model_default: Any
    """Where model.path names a model."""
    meaning: str
    free: bool
    """True: a mapping whose keys the configuration does not know (options of an environment)."""

    def default_with(self, model: str | None) -> Any:
        """`model`: model.path."""
        return self.default if model is None else self.model_default

    @property
    def dotted(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True)
class KeySection:
    """A named group of keys."""

    path: tuple[str, ...]
    meaning: str


@cache
def schema_entries() -> dict[tuple[str, ...], Key | KeySection]:
    """Keys and sections by path, sections before their keys, in the order of the file."""
    schema = RunConfig.model_json_schema()
    defaults = RunConfig().model_dump(mode="json")
    return {entry.path: entry for entry in _entries(schema, schema["$defs"], defaults, ())}


@cache
def dotted_keys() -> tuple[str, ...]:
    return tuple(entry.dotted for entry in schema_entries().values() if isinstance(entry, Key))


def _entries(
    schema: dict[str, Any], definitions: dict[str, Any], defaults: dict[str, Any], above: tuple[str, ...]
) -> Iterator[Key | KeySection]:
    for name, part in schema["properties"].items():
        path = (*above, name)
        if "$ref" in part:
            section = definitions[part["$ref"].rsplit("/", 1)[1]]
            yield KeySection(path, part.get("description") or section.get("description", ""))
            yield from _entries(section, definitions, defaults[name], path)
        else:
            free = part.get("type") == "object"
            model_default = MODEL_DEFAULTS.get(path, defaults[name])
            yield Key(path, _rule(part), defaults[name], model_default, part.get("description", ""), free)


def _rule(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_rule(part) for part in schema["anyOf"])
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


def _number_rule(noun: str, schema: dict[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f"{noun} from {low:g} to {high:g}"
    bounds = []
    if low is not None:
        bounds.append(f"of at least {low:g}")
    if high is not None:
        bounds.append(f"of at most {high:g}")
    if "exclusiveMinimum" in schema:
        bounds.append(f"above {schema['exclusiveMinimum']:g}")
    if "exclusiveMaximum" in schema:
        bounds.append(f"below {_plain(schema['exclusiveMaximum'])}")
    return f"{noun} {' and '.join(bounds)}".strip()


def _plain(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else f"{number:g}"


def _array_rule(schema: dict[str, Any]) -> str:
    if "prefixItems" in schema:
        parts = [_rule(part) for part in schema["prefixItems"]]
        return f"a list of {len(parts)}: {', '.join(parts)}"
    rule = _rule(schema["items"])
    plural = {"a mapping": "mappings", "a whole number": "whole numbers", "text": "texts"}
    return f"a list of {plural.get(rule, rule.replace('a list', 'lists', 1))}"
