"""A YAML file becomes a `RunConfig`; every mistake in it is one line that names its place and its key.

The form of an error: `FILE:LINE: <config.path> must <rule>, got <value>. <what to do>`.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from agentloop.config import RunConfig
from agentloop.config.keys import KEY_OF_NAME_ELSEWHERE, Key, schema_entries, value_at
from agentloop.config.sections.model import MODEL_DEFAULTS
from agentloop.config.strict_yaml import KeyPath, read_yaml, shown
from agentloop.errors import UserError
from context.wording import nearest

_TO_BE_GIVEN = "???"
"""A file's placeholder for a value that the command line must give, as in Hydra."""
_OWN = Path(__file__).parents[1] / "configs"

Place = Callable[[KeyPath], str]
"""Gives the place where a key was written, as the start of an error: `FILE:LINE` or the override."""


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Load the configuration in `path`, with `dotted.key=value` overrides over it; the last one wins."""
    given, places = read_keys(Path(path))
    return _load_over_defaults(given, places, overrides, source=str(path))


def _load_over_defaults(
    given: Mapping[str, Any], places: dict[KeyPath, str], overrides: Sequence[str], *, source: str
) -> RunConfig:
    """Put `given` over the defaults, key by key: a section that names one key keeps the defaults of its others.

    pydantic alone would fill `loss: {replay: {anchor: old}}` from the class's defaults, but `loss.fresh` and
    `loss.replay` have one class and different defaults.
    """

    def place(path: KeyPath) -> str:
        return next((places[path[:n]] for n in range(len(path), 0, -1) if path[:n] in places), source)

    def overlaid(defaults: Mapping[KeyPath, Any]) -> dict[str, Any]:
        values = to_plain(RunConfig())
        for path, default in defaults.items():
            value_at(values, path[:-1])[path[-1]] = default
        _overlay(given, (), values, place)
        for override in overrides:
            _apply(override, values, places)
        return values

    values = overlaid({})
    if values["model"]["path"] is not None:  # known only after the last override
        values = overlaid(MODEL_DEFAULTS)
    _check_given(values, (), place)
    return _validated(values, place)


def _check_given(value: Any, path: KeyPath, place: Place) -> None:
    """Raises UserError for a value that the file leaves to the command line and that was not given there."""
    for name, below in value.items() if isinstance(value, Mapping) else ():
        _check_given(below, (*path, name), place)
    if value == _TO_BE_GIVEN:
        dotted = ".".join(path)
        raise UserError(f"{place(path)}: {dotted} must be given, got ???. Add --set {dotted}=VALUE.")


def read_keys(path: Path) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """The keys and values of a file, not yet checked, and the place of each key.

    If no file `quickstart` exists, a name such as `quickstart` means the configuration that comes with agentloop.
    """
    source, own = str(path), _OWN / f"{path.name}.yaml"
    built_in = path.parent == Path() and own.is_file() and not path.exists()
    document = read_yaml(_read_text(own if built_in else path), source)
    given = {} if document.value is None else document.value
    if not isinstance(given, dict):
        found = shown(given)
        raise UserError(f"{source}:1: the file must hold keys and values, got {found}. See configs/reference.yaml.")
    return given, {key: f"{source}:{line}" for key, line in document.lines.items()}


def is_config_file(name: str) -> bool:
    """Whether a command's argument names a configuration file, by its ending."""
    return name.endswith((".yaml", ".yml"))


def to_plain(config: RunConfig) -> dict[str, Any]:
    """The whole configuration as JSON values, as it is stored with a run and printed by `--json`."""
    return config.model_dump(mode="json")


def load_plain(
    values: Mapping[str, Any], overrides: Sequence[str] = (), *, source: str = "stored configuration"
) -> RunConfig:
    """Load the result of `to_plain`, with overrides over it; keys that it lacks have their defaults."""
    return _load_over_defaults(values, {}, overrides, source=source)


def _read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
        return content.decode("utf-8-sig")
    except OSError as error:
        reason = (error.strerror or "unreadable").lower()
        own = ", ".join(sorted(file.stem for file in _OWN.glob("*.yaml")))
        raise UserError(
            f"{path}: the file must be there to read, got: {reason}. Check the path; these are built in: {own}."
        ) from None
    except UnicodeDecodeError as error:
        line, byte = content.count(b"\n", 0, error.start) + 1, content[error.start]
        raise UserError(f"{path}:{line}: the file must be UTF-8 text, got byte 0x{byte:02x}. Convert it.") from None


def _overlay(value: Any, path: KeyPath, values: dict[str, Any], place: Place) -> None:
    """Put a value in place of the value at a path: key by key for a section, else as a whole. Raises UserError for
    unknown keys."""
    entries, dotted = schema_entries(), ".".join(path)
    if not path or isinstance(entries.get(path), str):
        if isinstance(value, Mapping):
            for name, below in value.items():
                _overlay(below, (*path, name), values, place)
        elif value is not None:  # a section whose keys are all commented out reads as null
            rule = f"{dotted} must be a section of keys, got {shown(value)}. {_list_keys(path)}"
            raise UserError(f"{place(path)}: {rule}")
        return
    above = next((n for n in range(len(path)) if isinstance(entries.get(path[: n + 1]), Key)), None)
    if above is None:
        raise UserError(f"{place(path)}: {_unknown_key(path)}")
    key, inner, there = entries[path[: above + 1]], path[above:], value_at(values, path[:above])
    assert isinstance(key, Key)
    if key.kinds and inner[1:] == (next(iter(key.kinds[0])),):
        there[inner[0]] = {}  # another kind has options of its own
    for depth, name in enumerate(inner[:-1], above + 1):  # a key inside a free mapping: environment.options.hops
        below = there.get(name, {})
        if not isinstance(below, dict) or not key.free:
            found = f"{'.'.join(path[:depth])} must be a mapping to have keys below it, got {shown(below)}."
            raise UserError(f"{place(path)}: {found}")
        there[name] = dict(below)
        there = there[name]
    there[inner[-1]] = value


def _apply(override: str, values: dict[str, Any], places: dict[KeyPath, str]) -> None:
    source = f"override {shown(_without_password(override))}"
    dotted, equals, text = override.partition("=")
    if not equals or not dotted.strip():
        raise UserError(f"{source}: an override must be dotted.key=value, got no {'key' if equals else '='}.")
    path = tuple(dotted.strip().split("."))
    try:
        # YAML would read a placeholder at the beginning as a mapping.
        value = text if text.startswith("{split}") else read_yaml(text, source, at=path).value
    except UserError as error:
        rule = re.sub(r"^:\d+", "", str(error).removeprefix(source))  # an override has no line
        raise UserError(source + rule) from None
    _overlay(value, path, values, lambda _: source)
    places |= dict.fromkeys([path, *(key for key in places if key[: len(path)] == path)], source)


def _without_password(text: str) -> str:
    return re.sub(r"(?<=password=)[^&\s]*", "***", re.sub(r"(://[^:/@\s]*):\S*@", r"\1:***@", text))


def _unknown_key(path: KeyPath) -> str:
    advice = meant_key(path) or _list_keys(path[:-1])
    return f"{shown('.'.join(path))} must be a known key, got an unknown one. {advice}"


def meant_key(path: KeyPath) -> str | None:
    """Name the key that an unknown one means: of that name, below the same section first, of that name in other
    libraries, or of a similar name."""
    known = {each.dotted: each for each in schema_entries().values() if isinstance(each, Key)}
    dotted, above = ".".join(path), "".join(f"{name}." for name in path[:-1])
    meant = KEY_OF_NAME_ELSEWHERE.get(dotted) or KEY_OF_NAME_ELSEWHERE.get(path[-1])
    name = (meant or path[-1]).rpartition(".")[2]
    below = [key for key in known if key.startswith(above) and key.endswith(f".{name}")]
    if meant is not None:
        meant = meant if meant in below else min(below, key=lambda key: key.count("."), default=meant)
        return f"Here that is {meant}: {known[meant].meaning}"
    last = {key.rpartition(".")[2]: key for key in sorted(known, key=lambda key: -key.count("."))}
    sections = [path[0] for path in schema_entries() if len(path) == 1]
    similar = min(below, key=lambda key: key.count("."), default=None) or nearest(dotted, sections, cutoff=0.75)
    similar = similar or nearest(dotted, known)
    similar = similar or last.get(nearest(path[-1], last, cutoff=0.8) or "")
    return f"Did you mean {similar}?" if similar else None


def _list_keys(section: KeyPath) -> str:
    while section and not isinstance(schema_entries().get(section), str):
        section = section[:-1]  # there is no such section
    names = [path[-1] for path in schema_entries() if path[:-1] == section]
    if not names:  # the section itself is unknown
        return _list_keys(section[:-1])
    where = f" of {'.'.join(section)}" if section else ""
    return f"The keys{where}: {', '.join(names)}."


def _validated(values: dict[str, Any], place: Place) -> RunConfig:
    # In strict JSON mode `true` is no number and `128` no text, while lists still become tuples.
    try:
        text = json.dumps(_expand_home(values), allow_nan=False)
    except (TypeError, ValueError) as error:
        problem = shown(str(error))
        raise UserError(f"{place(())}: every value must be plain and finite, got: {problem}.") from None
    try:
        return RunConfig.model_validate_json(text, strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False)
    problems = dict(_describe_problem(details, values, place) for details in found)
    paths = list(schema_entries())
    first = min(problems, key=lambda path: paths.index(path) if path in paths else -1)
    more = "" if len(problems) == 1 else f" ({len(problems)} keys are wrong; this is the first.)"
    raise UserError(problems[first] + more) from None


def _describe_problem(details: ErrorDetails, values: Mapping[str, Any], place: Place) -> tuple[KeyPath, str]:
    """The key of a pydantic error, and the error as a sentence that begins with its place."""
    path, value = _known_key(details["loc"], values)
    where = (*path, *_keys_inside(details["loc"][len(path) :], value))
    entry, kind = schema_entries().get(path), details["type"]
    message = str(details.get("ctx", {}).get("error", details["msg"]))
    if kind == "value_error" and not message.startswith("must "):
        # A section within a mapping names its key without the path to it.
        return _locate_rule(message if where == path else ".".join((*where[:-1], message)), path, place)
    if kind != "value_error" and isinstance(entry, Key) and where == path:
        rule, default = f"must be {entry.rule}, got {_quote(value)}", entry.default_with(values["model"]["path"])
        return path, f"{place(path)}: {entry.dotted} {rule}. It is: {entry.meaning} Default: {_quote(default)}."
    if kind == "missing":
        where, message = (*where, str(details["loc"][-1])), "must be given, got nothing"
    elif kind == "extra_forbidden":
        message = "must be a known key, got an unknown one"
    elif kind != "value_error":
        message = f"must {message.partition('should ')[2] or 'be of a known kind'}, got {_quote(details['input'])}"
    return path, f"{place(where)}: {'.'.join(where)} {message}. See configs/reference.yaml."


def _known_key(parts: Sequence[str | int], values: Mapping[str, Any]) -> tuple[KeyPath, Any]:
    """The longest beginning of an error's place that is a key, and its value. Union members and indices follow it."""
    path: KeyPath = ()
    value: Any = values
    for part in parts:
        if not isinstance(part, str) or (*path, part) not in schema_entries():
            break
        path, value = (*path, part), value[part]
    return path, value


def _keys_inside(parts: Sequence[str | int], value: Any) -> Iterator[str]:
    """The keys below a key in the place of an error; indices and names of kinds are left out."""
    for part in parts:
        if isinstance(value, Mapping) and part in value:
            yield str(part)
            value = value[part]


def _locate_rule(message: str, path: KeyPath, place: Place) -> tuple[KeyPath, str]:
    """Describe a broken rule over several keys. Its place is that of the first named key that somebody has set.

    The key may be below a free mapping or a list, such as context.options.budget.
    """
    named = [tuple(key.split(".")) for key in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", message)]
    for key in (name[:length] for name in named for length in range(len(name), 0, -1)):
        is_known = isinstance(schema_entries().get(key), Key if len(key) == 1 else Key | str)
        if is_known and place(key) != place(()):
            return key, f"{place(key)}: {message}"
    return path, f"{place(path)}: {message}"


def _quote(value: object) -> str:
    """A value for an error message; text is in quotes, so that `got '128'` is not `got 128`."""
    return repr(shown(value)) if isinstance(value, str) else shown(value)


def _expand_home(value: Any) -> Any:
    """Replace `~/` by the user's home in every path, as a shell would."""
    if isinstance(value, str):
        return os.path.expanduser(value) if value.startswith("~/") else value
    if isinstance(value, Mapping):
        return {key: _expand_home(each) for key, each in value.items()}
    return [*map(_expand_home, value)] if isinstance(value, list) else value
