"""What a template and its tokenizer can be trusted with: one conversation per case, rendered and grown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from context.authors import default_authors
from context.messages import Message, ToolCall
from context.parse import PARSERS, choose_parser
from context.templates.chat_template import ChatTemplate, RenderError
from context.templates.hidden_parts import hidden_calls, hidden_message, hidden_result, hidden_tools
from context.templates.model_files import ModelFiles
from context.templates.render import Renderer, Rendering
from context.templates.rendering.reply_end import Sampled
from context.templates.row_forms import LOOKUP
from context.templates.template_probe import Thinking, changes, conversation
from context.tokens.token_sequence import TokenSequence

State = Literal["append_only", "rewrites_history", "unsupported"]


@dataclass(frozen=True)
class Case:
    """One kind of conversation."""

    name: str
    state: State
    details: tuple[str, ...]
    """Which messages are rewritten, or why it is not supported."""
    borders: int
    """Ends of replies where tokens would differ if the whole text were encoded at once."""


@dataclass(frozen=True)
class TemplateReport:
    cases: tuple[Case, ...]
    hidden: tuple[str, ...]
    """What it leaves out of prompts and of replies that are learned, as a run that needs it would refuse it."""
    parser: str
    """What `context.parser: auto` finds for the calls that it writes: a parser's name, or why there is none."""

    @property
    def state(self) -> State:
        """The worst of the cases that are supported; `unsupported` if none is."""
        states = {case.state for case in self.cases}
        if "rewrites_history" in states:
            return "rewrites_history"
        return "append_only" if "append_only" in states else "unsupported"

    def summary(self) -> str:
        """One line: the state, what is rewritten first, and the first thing that does not work."""
        rewriting = [case for case in self.cases if case.state == "rewrites_history"]
        parts = [in_words(self.state)]
        if rewriting:
            found = f"{len(rewriting)} of {len(self.cases)} cases, first in {rewriting[0].name!r}"
            parts = [f"{parts[0]} in {found}: {rewriting[0].details[0]}"]
        odd = next((case for case in self.cases if case.details and case not in rewriting), None)
        if odd is not None:
            state = "unsupported, " if odd.state == "unsupported" else ""
            parts.append(f"{odd.name!r}: {state}{odd.details[0].partition('. ')[0]}")
        return "; ".join(parts)


def in_words(state: State) -> str:
    return "append-only" if state == "append_only" else state.replace("_", " ")


# (name, messages as `conversation` spells them, the thinking of its replies, with tools)
_CASES: tuple[tuple[str, str, Thinking, bool], ...] = (
    ("system message", "suau", "none", False),
    ("two user turns", "uauau", "none", False),
    ("thinking, two user turns", "uauau", "some", False),
    ("tools", "uau", "none", True),
    ("tool results", "ucrcr", "none", True),
    ("tool results, then a user", "ucrau", "none", True),
    ("thinking between tool results", "ucrcr", "some", True),
    ("empty thinking between tool results", "ucrcr", "empty", True),
    ("thinking, tools, then a user", "ucrau", "some", True),
    ("parallel tool calls", "uprr", "none", True),
    ("tool result after an unreadable call", "uar", "none", True),
    ("empty reply", "ueu", "none", False),
)
_WORDS = {
    "system": "You are a careful agent.",
    "user": "What is the code of pearl?",
    "assistant": "The code is 78.",
    "tool": '{"next": "arrow"}',
    "thinking": "Which record was it?",
}


def check_template(model: ModelFiles) -> TemplateReport:
    """Run every case."""
    renderer = model.renderer(default_authors())
    cases = tuple(_case(renderer, model, *case) for case in _CASES)
    return TemplateReport(cases, tuple(dict.fromkeys(_hidden(renderer, model.template))), _parser(model.template))


def _hidden(renderer: Renderer, template: ChatTemplate) -> Iterator[str]:
    """One sentence for each kind of thing that is left out."""
    asked, tools = Message("user", _WORDS["user"]), (LOOKUP,)
    with_system = (Message("system", _WORDS["system"], "initialization"), asked)
    refused = hidden_message(template, with_system, tools)
    openings = [(asked,), with_system] if refused is None else [(asked,)]
    tools_of = (hidden_tools(template, tools, opening) for opening in openings)
    yield from filter(None, (refused, next(filter(None, tools_of), None), hidden_calls(template)))
    yield from filter(None, (hidden_result(template, (asked,), tools),))
    try:
        renderer.reply(Message("assistant", _WORDS["assistant"], reasoning=_WORDS["thinking"]))
    except RenderError as error:
        yield str(error)


def _parser(template: ChatTemplate) -> str:
    if hidden_calls(template) is not None:
        return "none, for the template writes no calls"
    try:
        chosen = type(choose_parser("auto", template))
    except ValueError as error:
        return str(error)
    return next(name for name, kind in PARSERS.items() if kind is chosen)


def _case(renderer: Renderer, model: ModelFiles, name: str, plan: str, thinking: Thinking, tools: bool) -> Case:
    rows = conversation(plan, thinking=thinking)
    messages = [_message(row) for row in rows]
    schemas = (LOOKUP,) if tools else ()
    found: dict[str, None] = {}
    increments: list[tuple[Rendering, Rendering, TokenSequence]] = []
    turns = list(_turns(plan))
    try:
        first = renderer.render(messages[: turns[0][0]], schemas)
        renderer.tokens(first)
        if plan == "uau" and tools and (problem := hidden_tools(model.template, schemas, messages[: turns[0][0]])):
            raise RenderError(problem)
        for reply, end in turns:
            before = renderer.render(messages[:reply], schemas, after=first)
            grown = renderer.render(messages[:end], schemas, after=before)
            increment = renderer.increment(before, grown, Sampled("", _stop(renderer, before, grown)))
            if increment is None:
                changed = changes(model.template, rows[:end], reply=reply, tools=schemas)
                found |= dict.fromkeys(changed or (f"message {reply} (assistant): is written differently",))
            else:
                increments.append((before, grown, increment))
    except (RenderError, ValueError) as error:
        return Case(name, "unsupported", (str(error),), 0)
    details, borders = list(found), 0
    try:
        renderer.initial(messages, schemas)
        borders = sum(_joined(renderer, *row) for row in increments)
    except (RenderError, ValueError) as error:
        details.append(f"can't be shown again once rewritten: {error}")
    return Case(name, "rewrites_history" if found else "append_only", tuple(details), borders)


def _stop(renderer: Renderer, before: Rendering, grown: Rendering) -> int | None:
    """The stop token that a policy that writes like the template would end its reply in."""
    tail = grown.written.text[len(before.written.text) :]
    return next((found.token for found in renderer.codec.controls(tail) if found.token in renderer.stop_ids), None)


def _joined(renderer: Renderer, before: Rendering, grown: Rendering, increment: TokenSequence) -> int:
    """At how many of both ends of the reply tokens would differ, were the conversation's text encoded as one."""
    whole, shown, added = (
        tokens.token_ids.tolist() for tokens in (renderer.tokens(grown), renderer.tokens(before), increment)
    )
    return int(whole[: len(shown)] != shown) + int(whole[len(whole) - len(added) :] != added)


def _turns(plan: str) -> Iterator[tuple[int, int]]:
    """Where each reply stands, and where what follows it ends."""
    replies = [index for index, letter in enumerate(plan) if letter in "acpe"]
    yield from pairwise([*replies, len(plan)])


def _message(row: dict[str, Any]) -> Message:
    """A row of `conversation` as a message, in words."""
    role = row["role"]
    return Message(
        role,
        _WORDS[role] if row["content"] else "",
        {"system": "initialization", "user": "user", "tool": "env"}.get(role, "initialization"),
        tuple(_call(call) for call in row.get("tool_calls", ())),
        name=row.get("name"),
        tool_call_id=row.get("tool_call_id"),
        reasoning=_WORDS["thinking"] if row.get("reasoning_content") else row.get("reasoning_content"),
    )


def _call(row: dict[str, Any]) -> ToolCall:
    return ToolCall(row["function"]["name"], {"key": "pearl"}, row["id"])
