"""A configuration as text for people: valid YAML, each key under its meaning.

`python -m agentloop.config.describe > configs/reference.yaml` writes the reference.
"""

import re
import sys
import textwrap
from typing import Any

import yaml

from agentloop.config import RunConfig
from agentloop.config.keys import Key, schema_entries, value_at
from agentloop.config.strict_yaml import resolve_scalar

_WIDTH = 120
_OBVIOUS = frozenset({"text", "text or null", "true or false", "a mapping"})

# Texts that readers of YAML 1.1 take for true or false.
_YAML_1_1 = frozenset({"y", "n", "yes", "no", "on", "off"})
_PLAIN = re.compile(r"[A-Za-z_/.][A-Za-z0-9_./-]*")
_REFERENCE_HEADER = """\
# Every key of a run, with its meaning, its rule and its default.
# A run's own file needs only the keys it changes; `agentloop config FILE` prints the rest.
# A value of ??? in a run's file must be given on the command line.
# Generated from agentloop/config by `python -m agentloop.config.describe`; don't edit by hand.
"""


def describe_config(config: RunConfig) -> str:
    """The effective configuration: every key under its meaning and rule, the default next to what differs."""
    values = config.model_dump(mode="json")
    lines: list[str] = []
    depth = 0
    explained: list[Any] = []  # a meaning that an earlier key of the same name has is not repeated
    for path, entry in schema_entries().items():
        indent = "  " * (len(path) - 1)
        if not isinstance(entry, Key):
            lines += ["", *_comment(entry, indent), f"{indent}{path[-1]}:"]
            depth = len(path)
            continue
        if len(path) <= depth:  # back from a nested section
            lines.append("")
        depth = len(path) - 1
        value = value_at(values, path)
        default = entry.default_with(config.model.path)
        differs = "" if value == default else f"  # default: {_flow(default)}"
        rule = "" if entry.rule in _OBVIOUS or entry.kinds else f" ({entry.rule})"
        if (path[-1], entry.meaning) not in explained:
            lines += _comment(entry.meaning + rule, indent)
            explained.append((path[-1], entry.meaning))
        if entry.model_default != entry.default:
            two = f"Default: {_flow(entry.default)}; where model.path names a model: {_flow(entry.model_default)}."
            lines += _comment(two, indent)
        for kind in entry.kinds:
            if kind not in explained:
                explained.append(kind)
                lines.append(f"{indent}#   {_flow(kind)}")
        lines.append(f"{indent}{path[-1]}: {_flow(value)}{differs}")
    return "\n".join(lines).strip() + "\n"


def changed_keys(config: RunConfig) -> dict[str, Any]:
    """Values that differ from their defaults, by dotted key."""
    values = config.model_dump(mode="json")
    keys = [entry for entry in schema_entries().values() if isinstance(entry, Key)]
    found = {key.dotted: (value_at(values, key.path), key.default_with(config.model.path)) for key in keys}
    return {name: value for name, (value, default) in found.items() if value != default}


def reference_yaml() -> str:
    return f"{_REFERENCE_HEADER}\n{describe_config(RunConfig())}"


def _comment(text: str, indent: str) -> list[str]:
    prefix = f"{indent}# "
    wrapped = textwrap.wrap(text, _WIDTH - len(prefix), break_on_hyphens=False)
    return [prefix + line for line in wrapped]


class _Dumper(yaml.SafeDumper):
    """Writes texts so that readers of YAML 1.1 and 1.2 agree on them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    same = resolve_scalar(value) == value and value.lower() not in _YAML_1_1
    plain = same and _PLAIN.fullmatch(value)
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if plain else '"')


_Dumper.add_representer(str, _text)


def _flow(value: Any) -> str:
    """One value as YAML on one line."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=float("inf"), sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("\n...")


if __name__ == "__main__":
    sys.stdout.write(reference_yaml())
