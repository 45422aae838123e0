"""Every configuration key with its rule, default and meaning, read off `RunConfig` itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from agentloop.config import RunConfig
from agentloop.config.model_defaults import MODEL_DEFAULTS
from replay.setting_types import rule_in_words


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


def value_at(values: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """What a plain configuration says at a path."""
    value: Any = values
    for name in path:
        value = value[name]
    return value


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
            yield Key(path, rule_in_words(part), defaults[name], model_default, part.get("description", ""), free)
