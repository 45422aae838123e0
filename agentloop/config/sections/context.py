"""The section `context`: what the policy sees, and whose tokens are trained."""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, Self, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError, field_validator, model_validator

from context import Author, AuthorTable, default_authors
from context.authors import DEMONSTRATION
from context.parse import PARSERS
from context.strategies import STRATEGIES, Strategy
from context.templates.model_files import BUILT_IN_TEMPLATES, template_source
from context.wording import suggest
from replay.config import ContextLength
from replay.errors import first_problem
from replay.setting_types import Section


def make_strategy(name: str, options: Mapping[str, Any]) -> Strategy:
    """Make `context.strategy` with `context.options`. Raises ValueError for options that it does not take."""
    kind = STRATEGIES[name]
    assert is_dataclass(kind)
    known = {field.name: field for field in fields(kind)}
    for option in options:
        if option not in known:
            raise ValueError(
                f"context.options must be options of strategy {name}, got {option!r}. {suggest(option, known)}"
            )
    for field in known.values():
        if field.name not in options and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"context.options must give {field.name!r}, which strategy {name} needs, got none.")
    hints = get_type_hints(kind)
    values = {option: _converted(option, value, hints[option]) for option, value in options.items()}
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"context.options.{error}") from None


def _converted(option: str, value: Any, wanted: Any) -> Any:
    try:
        return TypeAdapter(wanted).validate_python(value, strict=True)
    except ValidationError as error:
        _, rule, found = first_problem(error)
        raise ValueError(f"context.options.{option} must {rule}, got {found}.") from None


class AuthorSection(Section):
    """An author of the user's own, and the use of its tokens."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$", description="Its name in messages: judge, subagent:planner.")
    action: bool = Field(False, description="Its replies replace the policy's: response_mask, no log-probs.")
    trained: bool = Field(False, description="Their tokens carry loss: loss_mask; needs action.")
    shown: bool = Field(True, description="Prompts show its messages; false: they are only kept.")


def author_table(registered: Iterable[Author]) -> AuthorTable:
    """The table of the built-in authors, followed by the registered ones. Raises ValueError for a name that is taken.

    `demonstration` is built in, for the warm-up. If it is registered unchanged, environments can name it, too.
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


class ContextSection(ContextLength, Section):
    strategy: Literal[
        "linear", "linear_think", "sliding_window", "clip_tool_results", "self_clip", "memory", "hint"
    ] = Field("linear", description="How the next prompt shows the conversation; see docs/concepts.md.")
    options: dict[str, Any] = Field(default_factory=dict, description="Options of the strategy, e.g. {budget: 2000}.")
    parser: str = Field(
        "auto",
        description=f"Parser of the tool calls in a reply: {', '.join(PARSERS)}, or `path/to/file.py:ClassName` of "
        "your own; auto: the first that reads the calls which the chat template writes.",
    )
    authors: tuple[AuthorSection, ...] = Field(
        (),
        description="Authors besides the built-in ones that an environment's messages may name, what "
        "their tokens do, and whether prompts show them; for example {name: human_edit, action: true, trained: true, "
        "shown: true}.",
    )
    template: str | None = Field(
        None,
        description="Chat template that replaces the model's own, stored with the run: "
        f"{', '.join(BUILT_IN_TEMPLATES)}, which show tools, calls, results and thoughts; or a .jinja file's path.",
    )
    allow_hidden_tools: bool = Field(
        False,
        description="Go on where the chat template leaves tools, calls, their results or demonstrated thoughts out, "
        "instead of refusing it.",
    )
    template_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Further variables of the chat template, for example {enable_thinking: false}; a name that the "
        "template does not use is an error.",
    )
    stop_strings: tuple[str, ...] | None = Field(
        None,
        description="Texts that end a reply as a stop token does; null: those of the parser, which for react are "
        "[`Observation:`].",
    )

    @field_validator("template")
    @classmethod
    def _read_template(cls, given: str | None) -> str | None:
        """Replace a template file's path by its text, so that the run's configuration holds the template."""
        return given if given is None or given in BUILT_IN_TEMPLATES else template_source(given)

    @model_validator(mode="after")
    def _parts_can_be_made(self) -> Self:
        make_strategy(self.strategy, self.options)
        if ":" not in self.parser and self.parser != "auto" and self.parser not in PARSERS:
            raise ValueError(
                f"context.parser must be a built-in parser or path/to/file.py:ClassName, got {self.parser!r}. "
                f"{suggest(self.parser, ['auto', *PARSERS])}"
            )
        self.author_table()
        if "" in (self.stop_strings or ()):
            raise ValueError("context.stop_strings must hold texts of at least one character, got ''. Remove it.")
        return self

    def author_table(self) -> AuthorTable:
        """The table of authors that is stored with the run."""
        return author_table(self.registered_authors())

    def registered_authors(self) -> tuple[Author, ...]:
        """The authors, beyond the built-in ones, that an environment's messages may name."""
        try:
            # The probability with which an author wrote a token is not known, so these tokens have no log-probs.
            return tuple(Author(row.name, row.action, row.trained, row.shown, behavior=False) for row in self.authors)
        except ValueError as error:
            raise ValueError(f"context.{error}") from None
