"""Loads and calls users' own classes and functions, which are named `path/to/file.py:Name`.

A user's file becomes a module whose name contains its path, such as `agentloop.user_code.%2Fhome%2Fme%2Fmine%2Epy`. So
two files `mine.py` in different folders stay apart, and another process can load a pickled function of a file. Every
call of users' code is made within `users_code`.
"""

import asyncio
import functools
import importlib.util
import inspect
import os
import re
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, cast
from urllib.parse import quote, unquote

from agentloop.errors import NotJudged, RunStop, UserCodeFailed, UserError, one_line_with_place
from context.wording import suggest
from replay.sampling.samplers import Sampler, make_sampler

__path__: list[str] = []
"""Makes Python treat this module as a package whose submodules are users' files: see `_UserFileFinder`."""
_PREFIX = f"{__name__}."
_sources: dict[str, bytes] = {}
"""The content of each file when it was run, by its module's name."""
_GIVEN_PREFIX = "given:"
_GIVEN: dict[str, Callable[..., Any]] = {}
"""Functions that were passed to this process as objects, by their made-up names `given:ID:function`."""


@contextmanager
def users_code() -> Iterator[None]:
    """Turn whatever users' code raises in the block, even by sys.exit or Ctrl-C, into UserCodeFailed.

    A stop of the run, a UserError, a NotJudged and a cancellation pass unchanged. If the code forked, the child process
    ends here, so that it never becomes a second trainer.
    """
    process = os.getpid()
    try:
        yield
    except (UserError, NotJudged, RunStop, UserCodeFailed):
        raise
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and _is_being_cancelled():
            raise
        raise UserCodeFailed(one_line_with_place(error)) from error
    finally:
        if os.getpid() != process:
            os._exit(os.EX_SOFTWARE)


def _is_being_cancelled() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and task.cancelling() > 0


@contextmanager
def failing_as(before: str, after: str) -> Iterator[None]:
    """Turn a failure of users' code in the block into a UserError: the failure's text between `before` and `after`."""
    try:
        with users_code():
            yield
    except UserCodeFailed as failed:
        raise UserError(f"{before} {failed}{after}") from failed


def guarded(kind: type, methods: Sequence[str], rule: str) -> type[Any]:
    """Make a subclass of a user's class; a failure in one of its `methods` is a UserError with the `rule` before it."""

    def guard(name: str) -> Callable[..., Any]:
        @functools.wraps(getattr(kind, name))
        def call(self: Any, *args: Any, **options: Any) -> Any:
            with failing_as(rule, ". Mend it."):
                return getattr(super(made, self), name)(*args, **options)  # also calls static and class methods

        return call

    names = {name: guard(name) for name in methods}
    made = type(kind.__name__, (kind,), {"__module__": kind.__module__, "__doc__": kind.__doc__, **names})
    return made


def awaited_like(function: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """Make `call`, which returns what `function` returns, a coroutine function if `function` is one."""

    async def awaited(*args: Any, **options: Any) -> Any:
        return await call(*args, **options)

    return awaited if inspect.iscoroutinefunction(function) else call


def give_function(function: Callable[..., Any], *, what: str) -> str:
    """Give a callable of a notebook or script a name that `load_function` knows in this process alone."""
    made = _as_function(function)
    if not inspect.isfunction(made) or not made.__name__.isidentifier():
        raise UserError(
            f"{what} must be functions with names, got {function!r:.100}. Write def NAME(...), or name one as "
            "'path/to/file.py:function'."
        )
    # The code of a function that is passed again may have changed, so each time it counts as a new source.
    spec = f"{_GIVEN_PREFIX}{uuid.uuid4().hex}:{made.__name__}"
    _GIVEN[spec] = made
    return spec


def give_again(spec: str, *, begun: str) -> None:
    """Let the function of `spec` also stand for the one that a run began with as `begun`."""
    _GIVEN[begun] = _GIVEN[spec]


def _as_function(given: Any) -> Any:
    """Make a function of a method, a partial or an object with `__call__`; anything else is returned as it is."""
    inner = given
    while isinstance(inner, functools.partial):
        inner = inner.func
    plain, named = inspect.unwrap(getattr(inner, "__func__", inner)), inner
    if not inspect.isfunction(plain):
        plain, named = type(inner).__call__, type(inner)
    if inspect.isfunction(given) or not inspect.isfunction(plain):
        return given

    def call(*args: Any, **options: Any) -> Any:
        return given(*args, **options)

    made: Any = functools.wraps(plain)(awaited_like(plain, call))
    signature = inspect.signature(given)
    bound = getattr(given, "keywords", {})  # those of a partial, which nobody else fills in
    made.__signature__ = signature.replace(parameters=[p for n, p in signature.parameters.items() if n not in bound])
    own = getattr(given, "__dict__", {})  # a partial or an object may have got a name of its own
    made.__name__ = own.get("__name__", named.__name__)
    made.__doc__ = own.get("__doc__") or plain.__doc__ or named.__doc__
    return made


def shown_name(text: str) -> str:
    """Write the functions in a text that were passed as objects by their names, with file and line where known."""

    def named(found: re.Match[str]) -> str:
        code = _code_of(_GIVEN[found[0]]) if found[0] in _GIVEN else None
        known = code is not None and Path(code.co_filename).is_file()
        return f"{found[1]} ({code.co_filename}:{code.co_firstlineno})" if code and known else found[1]

    return re.sub(rf"{_GIVEN_PREFIX}[0-9a-f]+:(\w+)", named, text)


def text_of_given(spec: str) -> str:
    """Return the source of a function that was passed as an object, or its byte code where there is none."""
    code = _code_of(load_function(spec, what="environment.tools"))
    try:
        return inspect.getsource(code)
    except OSError:
        return str(code.co_code)


def _code_of(function: Callable[..., Any]) -> CodeType:
    """The code that a person wrote, below what decorators have put around it."""
    code: CodeType = getattr(inspect.unwrap(function), "__code__", function.__code__)
    return code


def is_given(spec: str) -> bool:
    """True for the name of a function that was passed as an object, so that no file holds it."""
    return spec.startswith(_GIVEN_PREFIX)


def load_class(spec: str, *, what: str) -> type:
    """Run the file of `spec` and return the class that it names; `what` is the config path that errors begin with."""
    return cast(type, _load_member(spec, "class", inspect.isclass, what))


def load_function(spec: str, *, what: str) -> Callable[..., Any]:
    """Return the function that `spec` names, from a file or from those passed as objects; see `load_class`."""
    if is_given(spec):
        if spec not in _GIVEN:
            name = spec.rpartition(":")[2]
            raise UserError(
                f"{what} must name functions in files where another process is to call them, got {name}, which was "
                f"given to agentloop.train as it is. Put it into a file, and train with 'path/to/file.py:{name}'."
            )
        return _GIVEN[spec]
    return cast(Callable[..., Any], _load_member(spec, "function", inspect.isfunction, what))


def load_sampler(spec: str, seed: int, options: Mapping[str, Any]) -> Sampler:
    """Make the sampler of `replay.sampler`. A class of the user's own is tried once on a made-up row."""
    if ":" not in spec:
        return make_sampler(spec, seed, options)
    kind = load_class(spec, what="replay.sampler")
    if not issubclass(kind, Sampler):
        raise UserError(
            f"replay.sampler must name a subclass of replay.Sampler, got {spec!r}. "
            "Derive it, and give every row a weight."
        )
    called = ("scores", "reference", "correction", "state", "load_state")  # besides `weigh`
    own = [name for name in called if getattr(kind, name, None) is not getattr(Sampler, name, None)]
    rule = f"replay.sampler must be a sampler that weighs rows, got {spec!r} with"
    with failing_as(rule, ". Mend it."):
        made: Sampler = make_sampler(guarded(kind, ["weigh", *own], rule), seed, options)
    made.try_out()
    return made


def _load_member(spec: str, kind: str, is_kind: Callable[[object], bool], what: str) -> Any:
    """Run the file of `spec` and return the class or function that it names. Raises UserError."""
    path, _, name = spec.rpartition(":")
    module = _run_file(file_of(spec, what=what), what=what)
    if not is_kind(found := getattr(module, name, None)):
        own = [key for key, value in inspect.getmembers(module, is_kind) if value.__module__ == module.__name__]
        raise UserError(f"{what} must name a {kind} of {path}, got {name!r}. {suggest(name, own)}")
    return found


def file_of(spec: str, *, what: str) -> Path:
    """Return the file of `path/to/file.py:name`. Raises UserError for another form, or if the file does not exist."""
    named, _, name = spec.rpartition(":")
    path = Path(named)
    if path.suffix != ".py" or not name.isidentifier():
        raise UserError(f"{what} must have the form path/to/file.py:NAME, got {spec!r}.")
    if not path.is_file():
        raise UserError(f"{what} must name a file that exists, got {named!r}. Looked for {path.absolute()}.")
    return path.resolve()


class _UserFileFinder(MetaPathFinder):
    """Imports users' files by module names that hold their paths, also in processes that unpickle their functions."""

    @staticmethod
    def module_name(path: Path) -> str:
        return _PREFIX + quote(str(path)).replace(".", "%2E")

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith(_PREFIX):
            return None
        file = Path(unquote(fullname.removeprefix(_PREFIX)))
        # The folder goes to the end of the search path: the file may import its neighbours, and they shadow nothing.
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))
        return importlib.util.spec_from_file_location(fullname, file, loader=_Uncached(fullname, str(file)))


class _Uncached(SourceFileLoader):
    """Compiles a file each time it is run, because Python's cache misses an edit within the same second."""

    def path_stats(self, path: Any) -> Any:
        raise OSError


sys.meta_path.append(_UserFileFinder())


def _run_file(path: Path, *, what: str) -> ModuleType:
    """Return the module of a file; the file is run again only after its content has changed."""
    name, source = _UserFileFinder.module_name(path), path.read_bytes()
    if name in sys.modules and _sources.get(name) == source:
        return sys.modules[name]
    for own in ("context", "replay"):
        if (path.parent / f"{own}.py").is_file() and re.search(rf"^\s*(from|import) {own}\b".encode(), source, re.M):
            raise UserError(
                f"{what} must name a file that can be imported, got {str(path)!r}, which imports {own}: a package of "
                f"agentloop, which hides {path.parent / own}.py. Rename yours."
            )
    sys.modules.pop(name, None)
    with failing_as(f"{what} must name a file that can be imported, got {str(path)!r} with", ". Mend the file."):
        module = importlib.import_module(name)
    _sources[name] = source
    return module
