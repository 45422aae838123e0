"""What a template and its tokenizer can be trusted with: one conversation per case, rendered and grown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from context.authors import default_authors
from context.messages import Message, ToolCall
from context.templates.chat_template import RenderError
from context.templates.model_files import ModelFiles
from context.templates.render import Renderer
from context.templates.template_probe import LOOKUP, Thinking, changes, conversation
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
    """Places where contents meet template text and tokens would differ if the whole text were encoded at once."""


@dataclass(frozen=True)
class TemplateReport:
    cases: tuple[Case, ...]
    shows_thinking: bool
    """False: the template leaves `reasoning_content` out, even of the newest reply."""

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
    try:
        thinking = model.template.render_rows(conversation("ua", thinking="some"), generation_prompt=False)
    except RenderError:
        thinking = ""
    return TemplateReport(cases, shows_thinking="thinking" in thinking)


def _case(renderer: Renderer, model: ModelFiles, name: str, plan: str, thinking: Thinking, tools: bool) -> Case:
    rows = conversation(plan, thinking=thinking)
    messages = [_message(row) for row in rows]
    schemas = (LOOKUP,) if tools else ()
    found: dict[str, None] = {}
    turns = list(_turns(plan))
    try:
        parts = [renderer.initial(messages[: turns[0][0]], schemas)]
        if plan == "uau" and tools:
            _check_tools_shown(model, rows[: turns[0][0]])
        for reply, end in turns:
            parts.append(renderer.increment(messages[reply], messages[reply + 1 : end]))
            changed = changes(model.template, rows[:end], reply=reply, tools=schemas)
            if changed is None:  # a template that leaves calls out: they stand in the text of the reply
                unmarked = conversation(re.sub("[cp]", "a", plan), thinking=thinking)
                changed = changes(model.template, unmarked[:end], reply=reply, tools=schemas)
            found |= dict.fromkeys(changed or ())
    except (RenderError, ValueError) as error:
        return Case(name, "unsupported", (str(error),), 0)
    details = list(found)
    try:
        parts.append(renderer.initial(messages, schemas))
    except (RenderError, ValueError) as error:
        details.append(f"can't be shown again once rewritten: {error}")
    borders = sum(border_differences(renderer, tokens) for tokens in parts)
    return Case(name, "rewrites_history" if found else "append_only", tuple(details), borders)


def _check_tools_shown(model: ModelFiles, prompt: Sequence[dict[str, Any]]) -> None:
    text = model.template.render_rows(prompt, tools=(LOOKUP,), generation_prompt=True)
    if LOOKUP["function"]["name"] not in text:
        raise RenderError(
            "chat template must show the tools, got one that leaves them out. Describe them in a message."
        )


def border_differences(renderer: Renderer, tokens: TokenSequence) -> int:
    """How many of the borders between authors the tokenizer would join, were the text encoded as one."""
    codec = renderer.codec
    edges = [0, *(t for t in range(1, len(tokens)) if tokens.authors[t] != tokens.authors[t - 1]), len(tokens)]
    pieces = [tokens.token_ids[a:b].tolist() for a, b in pairwise(edges)]
    return sum(codec.encode_template(codec.decode(a + b)) != a + b for a, b in pairwise(pieces))


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
