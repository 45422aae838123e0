"""Classes and functions people bring themselves, named `path/to/file.py:Name`."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from agentloop.errors import UserError, one_line_with_place

_LONGEST_NAME = 80
"""Of a name that is compared: it may come from a model, and comparing takes time."""


def load_class(spec: str, *, what: str) -> type:
    """The class that `spec` names. Runs the file. `what` is the config path an error starts with."""
    module, path, name = _named(spec, "ClassName", what)
    found = getattr(module, name, None)
    if not isinstance(found, type):
        classes = [name for name, value in vars(module).items() if isinstance(value, type) and _is_of(value, module)]
        raise UserError(f"{what} must name a class of {path}, got {name!r}. {suggest(name, classes)}")
    return found


def load_function(spec: str, *, what: str) -> Callable[..., Any]:
    """The function that `spec` names, likewise."""
    module, path, name = _named(spec, "function", what)
    found = getattr(module, name, None)
    if not inspect.isfunction(found):
        functions = [name for name, value in inspect.getmembers(module, inspect.isfunction) if _is_of(value, module)]
        raise UserError(f"{what} must name a function of {path}, got {name!r}. {suggest(name, functions)}")
    return found


def _named(spec: str, kind: str, what: str) -> tuple[ModuleType, str, str]:
    """The module, run, its path as it was written, and the name within it."""
    path_text, _, name = spec.rpartition(":")
    if not path_text.endswith(".py") or not name.isidentifier():
        raise UserError(f"{what} must have the form path/to/file.py:{kind}, got {spec!r}.")
    path = Path(path_text).expanduser()
    if not path.is_file():
        raise UserError(f"{what} must name a file that exists, got {path_text!r}. Looked for {path.absolute()}.")
    return _run_file(path.resolve(), what=what), path_text, name


def suggest(name: str, known: Iterable[str]) -> str:
    """A closing sentence for an unknown name: the nearest known one, or all of them."""
    choices = list(known)
    nearest = difflib.get_close_matches(name[:_LONGEST_NAME], choices, n=1, cutoff=0.6)
    if nearest:
        return f"Did you mean {nearest[0]}?"
    return f"There is {', '.join(choices)}." if choices else "There is none."


def _run_file(path: Path, *, what: str) -> ModuleType:
    name = f"agentloop_file_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise UserError(f"{what} must name a Python file, got {str(path)!r}.")
    module = importlib.util.module_from_spec(module_spec)
    # At the end of the search path: the file may import its neighbours, and they shadow nothing.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UserError(
            f"{what} must name a file that can be imported, got {str(path)!r} with {one_line_with_place(error)}. "
            "Mend the file."
        ) from error
    return module


def _is_of(value: type | FunctionType, module: ModuleType) -> bool:
    return value.__module__ == module.__name__
