"""A digest of an environment's source, which says whether it is still what a run was collected with."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Sequence
from pathlib import Path

from agentloop.user_code import file_of, given_digest


def digest_of_functions(own: str, *, tools: Sequence[str], judges: Sequence[str]) -> str:
    """A digest of a class's own and of the files that functions are in, which are named as the configuration does."""
    named = {"environment.tools": tools, "reward.functions": judges}
    specs = [(spec, what) for what, specs in named.items() for spec in specs]
    files = [given_digest(spec) or source_digest(file_of(spec, what=what)) for spec, what in specs]
    return hashlib.sha256(repr([own, *files]).encode()).hexdigest() if specs else own


def source_digest(file: Path) -> str:
    """The digest covers the file and what it imports from beside it, and that from beside it; nothing installed."""
    found: dict[str, str] = {}
    waiting = [file]
    while waiting:
        path = waiting.pop()
        name = path.relative_to(file.parent).as_posix()
        if name in found:
            continue
        content = path.read_bytes()
        found[name] = hashlib.sha256(content).hexdigest()
        for module in _imported(content):
            waiting += _beside(file.parent, module)
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def _imported(content: bytes) -> set[str]:
    """Names of the top-level modules that a source imports, wherever in it."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):  # of a package's file that nothing imports
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def _beside(folder: Path, module: str) -> list[Path]:
    """The module's file, or all files of the package; none where it lies elsewhere."""
    file, package = folder / f"{module}.py", folder / module
    if (package / "__init__.py").is_file():
        return sorted(package.rglob("*.py"))
    return [file] if file.is_file() else []
