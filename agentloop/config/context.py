"""What a run can be told about what the policy sees, and whose tokens are trained."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from agentloop.context_parts import author_table, check_parser_name, make_strategy
from context import Author, AuthorTable
from context.control import TrainingControl
from replay.section import Positive, Section


class AuthorSection(Section):
    """A kind of author besides the built-in ones; what its tokens are for."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9_.:-]{1,64}$", description="What messages call it: judge, subagent:planner, human_edit."
    )
    action: bool = Field(
        False, description="Its assistant messages stand in the policy's place: response_mask, without log-probs."
    )
    trained: bool = Field(False, description="Their tokens carry loss: loss_mask; needs action.")
    shown: bool = Field(True, description="Prompts show its messages; false: they are only kept.")

    def author(self) -> Author:
        """Nothing says with which probability somebody wrote a token: such tokens have no log-probs."""
        return Author(self.name, self.action, self.trained, self.shown, behavior=False)


class ContextSection(Section):
    max_tokens: Positive = Field(512, description="Longest training sequence, prompt and replies, in tokens.")
    strategy: Literal[
        "linear", "linear_think", "sliding_window", "clip_tool_results", "self_clip", "memory", "hint"
    ] = Field("linear", description="What the next prompt shows of the conversation; see docs/concepts.md.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the strategy, for example {budget: 2000}."
    )
    strict: bool = Field(
        False,
        description="Stop the run where the chat template or the strategy rewrites history, instead of beginning a "
        "new segment.",
    )
    parser: str = Field(
        "auto",
        description="How tool calls are read from a reply: hermes, llama3_json, pythonic, react, or "
        "`path/to/file.py:ClassName` of your own; auto: by the chat template.",
    )
    authors: tuple[AuthorSection, ...] = Field(
        (),
        description="Authors besides the built-in ones that an environment's messages may name: what their tokens are "
        "for, and whether prompts show them; for example {name: human_edit, action: true, trained: true, shown: true}.",
    )
    keep_turns: tuple[int, ...] | None = Field(
        None, description="The only replies to train, by number from 0; negative ones from the end; null: all."
    )
    discard_turns: tuple[int, ...] = Field((), description="Replies not to train, counted alike.")
    blackout: tuple[str, ...] = Field((), description="Texts whose first occurrence in each reply is not trained.")
    blackout_after_end: bool = Field(False, description="Train nothing behind the first stop token of a reply.")

    @model_validator(mode="after")
    def _parts_can_be_made(self) -> Self:
        make_strategy(self.strategy, self.options)
        check_parser_name(self.parser)
        self.author_table()
        if not all(self.blackout):
            raise ValueError("context.blackout must hold texts of at least one character, got ''. Remove it.")
        return self

    def author_table(self) -> AuthorTable:
        """The built-in authors and `authors`: what is stored with the run."""
        try:
            rows = self.registered_authors()
        except ValueError as error:
            raise ValueError(f"context.{error}") from None
        return author_table(rows)

    def registered_authors(self) -> tuple[Author, ...]:
        """Those that messages of an environment may name."""
        return tuple(row.author() for row in self.authors)

    def training_control(self) -> TrainingControl:
        return TrainingControl(self.keep_turns, self.discard_turns, self.blackout, self.blackout_after_end)
