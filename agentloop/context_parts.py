"""The parts of a context manager, made from what the configuration says about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from agentloop.class_file import load_class, suggest
from agentloop.errors import UserError, one_line_with_place
from context import Author, AuthorTable, ReplyParser, choose_parser, default_authors
from context.authors import DEMONSTRATION
from context.parse import PARSERS
from context.strategies import STRATEGIES, Strategy


def make_strategy(name: str, options: Mapping[str, Any]) -> Strategy:
    """`context.strategy` with `context.options`, its fields. Raises ValueError for what does not fit."""
    kind = STRATEGIES[name]
    assert is_dataclass(kind)
    known = {field.name: field for field in fields(kind)}
    for option in options:
        if option not in known:
            raise ValueError(
                f"context.options must be options of strategy {name}, got {option!r}. {suggest(option, known)}"
            )
    missing = next((field.name for field in known.values() if field.name not in options and _is_required(field)), None)
    if missing is not None:
        raise ValueError(f"context.options must give {missing!r}, which strategy {name} needs, got none.")
    hints = get_type_hints(kind)
    values = {option: _converted(option, value, hints[option]) for option, value in options.items()}
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"context.options.{error}") from None


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _converted(option: str, value: Any, wanted: Any) -> Any:
    try:
        return TypeAdapter(wanted).validate_python(value, strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]["msg"]
        raise ValueError(f"context.options.{option} must be {_shown(wanted)}, got {value!r}. {problem}.") from None


def _shown(wanted: Any) -> str:
    """A type as people write it."""
    if get_origin(wanted) is Literal:
        return " or ".join(map(str, get_args(wanted)))
    return {int: "a whole number", str: "text", bool: "true or false"}.get(wanted, str(wanted))


def author_table(registered: Iterable[Author]) -> AuthorTable:
    """The built-in authors and then the run's own, in their order. Raises ValueError for a name that is taken.

    `demonstration` is built in, for the warm-up; registered as it is, environments may name it too.
    """
    built_in = default_authors()
    rows = [*built_in.authors]
    for author in registered:
        if author == built_in.author(DEMONSTRATION):
            continue
        if author.action and not author.shown:
            raise ValueError(
                f"context.authors must show an author with action: true, got shown: false for {author.name!r}. "
                "What no prompt shows has no tokens: set shown: true, or action: false."
            )
        if author.name in {row.name for row in rows}:
            raise ValueError(f"context.authors must have names of their own, got {author.name!r} twice. Rename it.")
        rows.append(author)
    return AuthorTable(rows)


def check_parser_name(name: str) -> None:
    """Raises ValueError unless `make_parser` may know it."""
    if ":" not in name and name != "auto" and name not in PARSERS:
        raise ValueError(
            f"context.parser must be a built-in parser or path/to/file.py:ClassName, got {name!r}. "
            f"{suggest(name, ['auto', *PARSERS])}"
        )


def make_parser(name: str, template_source: str) -> ReplyParser:
    """The parser of `context.parser`: built-in, `auto` by the chat template, or a class of the user's own."""
    if ":" not in name:
        try:
            return choose_parser(name, template_source)
        except ValueError as error:
            raise UserError(str(error)) from None
    found = load_class(name, what="context.parser")
    if not callable(getattr(found, "parse", None)):
        raise UserError(f"context.parser must have parse(self, text, *, stopped) -> Reply, got {name!r} without it.")
    try:
        parser: ReplyParser = found()
    except Exception as error:
        problem = one_line_with_place(error)
        raise UserError(
            f"context.parser must be made without arguments, got {name!r} with {problem}. Mend it."
        ) from error
    return parser
