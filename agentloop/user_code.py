"""Classes and functions people bring themselves, named `path/to/file.py:Name`, or given as they are in Python."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from agentloop.errors import UserError, one_line_with_place
from context.wording import suggest
from replay.sampling.samplers import Sampler, make_sampler

_HERE = "given:"
"""How the name of a function begins that this process was given, where others have a file."""
_GIVEN: dict[str, Callable[..., Any]] = {}
"""Such functions by the names they were given, `given:DIGEST:function`."""


def give_function(function: Callable[..., Any], *, what: str) -> str:
    """A name for a function of a notebook or a script, that `load_function` knows in this process alone."""
    if not inspect.isfunction(function) or not function.__name__.isidentifier():
        raise UserError(
            f"{what} must be functions with names, got {function!r:.100}. Write def NAME(...), or name one as "
            "'path/to/file.py:function'."
        )
    # Nobody can tell whether a function that is given again does what it did: each time is another source.
    spec = f"{_HERE}{uuid.uuid4().hex}:{function.__name__}"
    _GIVEN[spec] = function
    return spec


def is_given(spec: str) -> bool:
    """Whether it names no file."""
    return spec.startswith(_HERE)


def given_digest(spec: str) -> str | None:
    """The digest of a function that this process was given; None for one that a file holds."""
    return spec.removeprefix(_HERE).partition(":")[0] if is_given(spec) else None


def load_class(spec: str, *, what: str) -> type:
    """The class that `spec` names. Runs the file. `what` is the config path an error starts with."""
    module, path, name = _named(spec, "ClassName", what)
    found = getattr(module, name, None)
    if not isinstance(found, type):
        classes = [name for name, value in vars(module).items() if isinstance(value, type) and _is_of(value, module)]
        raise UserError(f"{what} must name a class of {path}, got {name!r}. {suggest(name, classes)}")
    return found


def load_function(spec: str, *, what: str) -> Callable[..., Any]:
    """The function that `spec` names, likewise; or one that was given in this process."""
    if is_given(spec):
        if spec not in _GIVEN:
            name = spec.rpartition(":")[2]
            raise UserError(
                f"{what} must name functions in files where another process is to call them, got {name}, which was "
                f"given to agentloop.train as it is. Put it into a file, and train with 'path/to/file.py:{name}'."
            )
        return _GIVEN[spec]
    module, path, name = _named(spec, "function", what)
    found = getattr(module, name, None)
    if not inspect.isfunction(found):
        functions = [name for name, value in inspect.getmembers(module, inspect.isfunction) if _is_of(value, module)]
        raise UserError(f"{what} must name a function of {path}, got {name!r}. {suggest(name, functions)}")
    return found


def load_sampler(spec: str, seed: int, options: Mapping[str, Any]) -> Sampler:
    """The sampler of `replay.sampler`: a built-in one, or a class of the user's own, tried once on a made-up row."""
    if ":" not in spec:
        return make_sampler(spec, seed, options)
    kind = load_class(spec, what="replay.sampler")
    if not issubclass(kind, Sampler):
        raise UserError(
            f"replay.sampler must name a subclass of replay.Sampler, got {spec!r}. "
            "Derive it, and give every row a weight."
        )
    try:
        made = make_sampler(kind, seed, options)
        made.try_out()
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"replay.sampler must be a sampler that weighs rows, got {spec!r} with "
            f"{one_line_with_place(error)}. Mend it."
        ) from error
    return made


def _named(spec: str, kind: str, what: str) -> tuple[ModuleType, str, str]:
    """The module, run, its path as it was written, and the name within it."""
    path_text, _, name = spec.rpartition(":")
    if not path_text.endswith(".py") or not name.isidentifier():
        raise UserError(f"{what} must have the form path/to/file.py:{kind}, got {spec!r}.")
    path = Path(path_text).expanduser()
    if not path.is_file():
        raise UserError(f"{what} must name a file that exists, got {path_text!r}. Looked for {path.absolute()}.")
    return _run_file(path.resolve(), what=what), path_text, name


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
