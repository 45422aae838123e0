"""Settings of a run's batches as people choose them on a page: texts, over the run's own configuration."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from replay.config import ReplayConfig, StoredConfig
from replay.errors import ReplayError
from replay.questions.filters.query import QueryResult
from replay.sampling.samplers import SAMPLERS
from replay.setting_types import rule_in_words

CONTROLS = ("fraction", "unit", "task_members", "sampler", "successful_only", "max_staleness", "max_uses", "mode")
"""Keys of `replay` that are chosen. Besides, `SAMPLER.OPTION` is an option of that sampler."""


class WrongSettings(ReplayError):
    """Settings that no batch can be made by."""

    def __init__(self, errors: Mapping[str, str]) -> None:
        super().__init__(" ".join(errors.values()))
        self.errors = errors
        """By control, or `sampler_options`."""


def changed(stored: StoredConfig, given: Mapping[str, str]) -> StoredConfig:
    """`stored` with the values that were given in place of its own; an empty text is null. Raises WrongSettings."""
    own = stored.replay
    replay = dict(own) | {name: text.strip() or None for name, text in given.items() if name in CONTROLS}
    if replay["unit"] != "task":
        replay["task_members"] = None
    options = own.sampler_options if replay["sampler"] == own.sampler else {}
    prefix = f"{replay['sampler']}."
    chosen = {name.removeprefix(prefix): _scalar(text) for name, text in given.items() if name.startswith(prefix)}
    try:
        return StoredConfig.model_validate({**dict(stored), "replay": replay | {"sampler_options": options | chosen}})
    except ValidationError as error:
        raise WrongSettings(dict(map(_by_control, error.errors(include_url=False)))) from error


def as_yaml(replay: ReplayConfig) -> str:
    """The part `replay` of a configuration: what is other than the defaults."""
    values = replay.model_dump(mode="json", exclude_defaults=True)
    return yaml.safe_dump({"replay": values}, sort_keys=False)


def options_of(sampler: str) -> list[dict[str, Any]]:
    """Name, default and, where there are some, choices of each option of a built-in sampler."""
    kind = SAMPLERS[sampler].Options
    types, made = typing.get_type_hints(kind), kind()
    return [
        {
            "name": field.name,
            "default": getattr(made, field.name),
            "choices": list(typing.get_args(given)) if typing.get_origin(given) is Literal else None,
        }
        for field in fields(kind)
        for given in (types[field.name],)
    ]


def _scalar(text: str) -> Any:
    """As YAML would read it, more or less: the options' own types say whether it fits. What is no JSON is a text."""
    if text.strip() in ("", "null"):
        return None
    try:
        value = json.loads(text)
        # NaN, and numbers that are too large to be told from infinity, can't be part of an answer.
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text.strip()
    return value


def _by_control(details: ErrorDetails) -> tuple[str, str]:
    """The control that a mistake is shown beside, and the rule that it breaks."""
    reason = details.get("ctx", {}).get("error")
    if reason is not None:
        return _control_of(str(reason)), str(reason)
    name = str(details["loc"][1])
    rule = rule_in_words(ReplayConfig.model_json_schema()["properties"][name])
    return name, f"replay.{name} must be {rule}, got {details['input']!r:.60}."


def _control_of(message: str) -> str:
    found = re.match(r"replay\.(\w+)", message)
    return found[1] if found and found[1] in (*CONTROLS, "sampler_options") else "unit"


def wrong(message: str) -> WrongSettings:
    """One mistake, shown beside the control that its text begins with."""
    return WrongSettings({_control_of(message): message})


def shown(replay: ReplayConfig) -> QueryResult:
    """The values of the controls."""
    return {name: getattr(replay, name) for name in (*CONTROLS, "sampler_options")}
