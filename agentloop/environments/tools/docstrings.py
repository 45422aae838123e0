"""What a docstring tells the model: a description and one line per parameter. Google style and reST."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass

_PARAMETER_SECTIONS = ("args:", "arguments:", "parameters:", "params:")
_SECTION = re.compile(r"[A-Z][A-Za-z ]*:$")
_GOOGLE_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_REST_FIELD = re.compile(r":(\w+)(?:\s+([^:]*))?:\s*(.*)$")
_REST_PARAMETER = ("param", "parameter", "arg", "argument", "key", "keyword")


@dataclass(frozen=True)
class Docstring:
    description: str
    """The first paragraph, on one line; empty if there is none."""
    parameters: dict[str, str]
    """Documented parameters in their order, each on one line."""


def parse_docstring(text: str | None) -> Docstring:
    """Read a docstring as Python stores it. Return values, exceptions and examples are not for the model."""
    lines = inspect.cleandoc(text or "").splitlines()
    description: list[str] = []
    for line in lines:
        if not line.strip() or _begins_section(line):
            break
        description.append(line.strip())
    return Docstring(" ".join(description), {**_google(lines), **_rest(lines)})


def _begins_section(line: str) -> bool:
    return (
        line.lower() in _PARAMETER_SECTIONS or _SECTION.match(line) is not None or _REST_FIELD.match(line) is not None
    )


def _google(lines: list[str]) -> dict[str, str]:
    """The entries of `Args:`: the least indented lines begin one, deeper lines continue it."""
    section = list(_parameter_section(lines))
    base = min((_indent(line) for line in section), default=0)
    found: dict[str, str] = {}
    name = None
    for line in section:
        entry = _GOOGLE_ENTRY.match(line.strip()) if _indent(line) == base else None
        if entry is not None:
            name = entry[1]
            found[name] = entry[2].strip()
        elif name is not None:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def _parameter_section(lines: list[str]) -> Iterator[str]:
    inside = False
    for line in lines:
        if line and not line[0].isspace():
            inside = line.lower().strip() in _PARAMETER_SECTIONS
        elif inside and line.strip():
            yield line


def _rest(lines: list[str]) -> dict[str, str]:
    """The `:param name:` and `:param type name:` fields; indented lines continue one."""
    found: dict[str, str] = {}
    name = None
    for line in lines:
        field = _REST_FIELD.match(line)
        if field is not None:
            words = (field[2] or "").split()
            name = words[-1].lstrip("*") if field[1] in _REST_PARAMETER and words else None
            if name is not None:
                found[name] = field[3].strip()
        elif name is not None and line[:1].isspace() and line.strip():
            found[name] = f"{found[name]} {line.strip()}".strip()
        else:
            name = None
    return found


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
