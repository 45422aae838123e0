"""The actors of a run's episodes: engine, environments and context, made once and checked at the start."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from agentloop.config import RunConfig
from agentloop.config.sections.context import ContextSection, make_strategy
from agentloop.engines import Completion, ConcurrentGenerator, Generator
from agentloop.environments import EnvironmentFactory, RunEnvironments
from agentloop.environments.tools.tool_memory import ToolMemory
from agentloop.errors import UserError, needing
from agentloop.user_code import failing_as, guarded, load_class
from context import AuthorTable, ChatTemplate, Message, ReactParser, Renderer, RenderError, ReplyParser, choose_parser
from context.messages import canonical_json, shown_messages
from context.parse import unread_call
from context.strategies import Linear, Strategy
from context.templates.hidden_parts import hidden_message, hidden_result, hidden_tools
from context.templates.model_files import ModelFiles
from context.templates.rendering.conversation_writer import Rendering

if TYPE_CHECKING:
    from agentloop.gateway.agent_sessions import Policy
    from agentloop.gateway.run_gateway import RunGateway

Tools = Sequence[Mapping[str, Any]]
_log = logging.getLogger(__name__)
_MOST_WARNINGS = 20
_MOST_PARSERS = 64
"""Sets of tools for which a parser is cached."""


class Warnings:
    """Logs each reason for an odd episode once, and at most a fixed number of reasons."""

    def __init__(self) -> None:
        self._reasons: set[str] = set()

    def warn(self, text: str, *, reason: str | None = None) -> None:
        """Log the text unless its `reason`, by default the text itself, was logged before."""
        reason = reason or text
        if reason in self._reasons or len(self._reasons) == _MOST_WARNINGS:
            return
        self._reasons.add(reason)
        _log.warning("%s", text)
        if len(self._reasons) == _MOST_WARNINGS:
            _log.warning("further reasons are counted, and not shown")


@dataclass(frozen=True)
class Actors:
    """The parts that run an episode, the same ones for training and for evaluation."""

    environments: RunEnvironments
    generator: Generator | ConcurrentGenerator
    renderer: Renderer
    parser: ReplyParser
    """Reads replies in tasks that offer all tools of their environment."""
    authors: AuthorTable
    vocab_size: int
    """Size of the policy's vocabulary: every token id that it samples is smaller."""
    parsers: Callable[[Tools], ReplyParser]
    """Makes the parser for a task's own tools. Raises RenderError for tools that the model can't be shown."""
    strategy: Strategy = field(default_factory=Linear)
    warnings: Warnings = field(default_factory=Warnings)
    gateway: RunGateway | None = None
    """The server at which agents ask the policy; None: no environment has an agent."""
    memory: ToolMemory | None = None
    """Answers of deterministic tools; None: every call is run."""
    served: Callable[[Rendering, int], Awaitable[Completion]] | None = None
    """A model elsewhere that replies in the policy's place in an evaluation; None: the policy replies itself."""


def make_actors(
    config: RunConfig,
    environments: RunEnvironments,
    files: ModelFiles,
    generator: Generator | ConcurrentGenerator,
    *,
    vocab_size: int,
) -> Actors:
    section = config.context
    authors = section.author_table()
    return Actors(
        environments,
        generator,
        files.renderer(authors, stop_strings(config, files), allow_hidden=section.allow_hidden_tools),
        checked_parser(section, environments, files),
        authors,
        vocab_size,
        parsers_by_tools(section, files.template),
        make_strategy(section.strategy, section.options),
        memory=tool_memory(config, environments),
    )


@contextmanager
def with_gateway(actors: Actors, config: RunConfig) -> Iterator[Actors]:
    """Yield the actors, with a gateway if an environment has an agent. Raises UserError if the gateway can't start."""
    if not any(factory.agent for factory in actors.environments.all):
        yield actors
        return
    if actors.served is not None:
        raise UserError("--url must be for environments without an agent, got one. Give the agent the address itself.")
    with needing("gateway", "environment.agent"):
        from agentloop.gateway.run_gateway import run_gateway
    with run_gateway(config.gateway, agents_policy(config, actors.renderer)) as gateway:
        yield replace(actors, gateway=gateway)


def agents_policy(config: RunConfig, renderer: Renderer) -> Policy:
    """Make the policy that answers agents at their base URL."""
    from agentloop.gateway.agent_sessions import Policy

    parser = parsers_by_tools(config.context, renderer.template)
    limits = (config.context.max_tokens, config.rollout.max_tokens_per_turn)
    return Policy(renderer, parser, *limits, config.gateway.unsupported)


def parsers_by_tools(section: ContextSection, template: ChatTemplate) -> Callable[[Tools], ReplyParser]:
    """Make a function that makes the parser for some tools. It raises RenderError for tools that can't be shown."""

    @lru_cache(_MOST_PARSERS)
    def made(tools: str) -> ReplyParser:
        offered, opening = json.loads(tools), [Message("user", "x")]
        try:
            parser = make_parser(section.parser, template, tools=offered)
        except UserError as error:
            raise RenderError(str(error)) from None
        problem = _unread_calls(parser, template) if offered else None
        if problem is None and section.parser == "auto" and not section.allow_hidden_tools:
            problem = hidden_tools(template, offered, opening)
        if problem is not None:
            raise RenderError(problem)
        return parser

    def parser(tools: Tools) -> ReplyParser:
        return made(canonical_json(list(tools)))

    return parser


def tool_memory(config: RunConfig, environments: RunEnvironments) -> ToolMemory | None:
    """Make an empty memory; None where no tool is deterministic, or where answers may not be stored."""
    deterministic = [factory for factory in environments.all if factory.has_deterministic_tools]
    if not (config.rollout.replay_observations and config.replay.redact is None and deterministic):
        return None
    return ToolMemory(*(factory.tools_hash(config.rollout.tool_output_chars) for factory in deterministic))


def stop_strings(config: RunConfig, files: ModelFiles) -> tuple[str, ...]:
    """Return `context.stop_strings` or, if that is unset, the stop strings of the run's parser."""
    section = config.context
    if section.stop_strings is not None:
        return section.stop_strings
    return tuple(getattr(make_parser(section.parser, files.template), "stop_strings", ()))


def make_parser(name: str, template: ChatTemplate, *, tools: Sequence[Mapping[str, Any]] = ()) -> ReplyParser:
    """Make the parser of `context.parser`: a built-in one, the chat template's for `auto`, or a user's class."""
    if ":" not in name:
        try:
            return choose_parser(name, template, tools=tools)
        except ValueError as error:
            raise UserError(str(error)) from None
    found = load_class(name, what="context.parser")
    if not callable(getattr(found, "parse", None)):
        raise UserError(f"context.parser must have parse(self, text, *, stopped) -> Reply, got {name!r} without it.")
    rule = f"context.parser must read any reply, and be made without arguments, got {name!r} with"
    with failing_as(rule, ". Mend it."):
        parser: ReplyParser = guarded(found, ["parse"], rule)()
    return parser


def checked_parser(section: ContextSection, environments: RunEnvironments, files: ModelFiles) -> ReplyParser:
    """Make the parser of `context.parser` and check it with the chat template.

    Raises UserError if the template hides messages or tools of an environment, or writes calls that the parser can't
    read.
    """
    parser = make_parser(section.parser, files.template, tools=environments.tools)
    for factory in environments.all:
        _check_shown(factory, files.template, section)
    problem = _unread_calls(parser, files.template) if environments.tools else None
    if problem is not None:
        raise UserError(problem)
    return parser


def _unread_calls(parser: ReplyParser, template: ChatTemplate) -> str | None:
    """Explain why the parser can't read the template's calls; None if it can, or if it reads calls in another form."""
    unread = unread_call(parser, template)
    if unread is None or isinstance(parser, ReactParser):
        return None
    return (
        "context.parser must read the tool calls that the model's chat template writes, got "
        f"{type(parser).__name__} for {unread!r}. Name another one, or a class of your own."
    )


def _check_shown(factory: EnvironmentFactory, template: ChatTemplate, section: ContextSection) -> None:
    named = section.parser != "auto"
    openings: list[Sequence[Message]] = [] if named else [(Message("user", "x"),)]
    checked: list[tuple[Sequence[Message], Tools]] = [(opening, factory.tools) for opening in openings]
    for task in factory.all_examples:
        checked.append((shown_messages(task.messages(), section.author_table()), factory.tools_for(task)))
    for opening, tools in checked:
        problem = hidden_message(template, opening, tools)
        if problem is None and tools and not section.allow_hidden_tools:
            problem = hidden_tools(template, tools, opening, described=named) or hidden_result(template, opening, tools)
        if problem is not None:
            raise UserError(problem)
