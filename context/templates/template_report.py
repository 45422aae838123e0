"""Tries a template with its tokenizer: a conversation per case is rendered, and grows turn by turn."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from context.authors import default_authors
from context.messages import Message, ToolCall
from context.parse.choose import auto_parser
from context.templates.chat_template import LOOKUP, ChatTemplate, RenderError
from context.templates.hidden_parts import hidden_calls, hidden_message, hidden_result, hidden_tools
from context.templates.model_files import ModelFiles
from context.templates.render import Renderer
from context.templates.rendering.conversation_writer import Rendering
from context.templates.rendering.reply_end import Sampled

State = Literal["append-only", "rewrites history", "unsupported"]
Thinking = Literal["none", "empty", "some"]
"""The thinking before the content of replies: none, an empty block, or thoughts."""


@dataclass(frozen=True)
class Case:
    name: str
    state: State
    details: tuple[str, ...]
    """The messages that are rewritten, or why the case is not supported."""


@dataclass(frozen=True)
class TemplateReport:
    cases: tuple[Case, ...]
    parts: Mapping[str, str | None]
    """Part of a prompt or of a learned reply -> why a run that needs it would refuse the template. None: the template
    shows the part."""
    parser: str
    """The parser that `context.parser: auto` takes where there are tools, or why there is none."""

    @property
    def state(self) -> State:
        """The worst state of the supported cases. `unsupported`: no case is supported."""
        states = {case.state for case in self.cases}
        worst: tuple[State, ...] = ("rewrites history", "append-only")
        return next((state for state in worst if state in states), "unsupported")

    def summary(self) -> str:
        """The state in one line, with the number of cases that have it."""
        count = sum(case.state == self.state for case in self.cases)
        return self.state if count == len(self.cases) else f"{self.state} in {count} of {len(self.cases)} cases"


# (name, messages as `conversation` spells them, the thinking of its replies, whether there are tools)
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
_ASKING = {
    "s": Message("system", "You are a careful agent.", "initialization"),
    "u": Message("user", "What is the code of pearl?"),
}
_ANSWER = "The code is 78."
_CALL_IDS = ("call00001", "call00002")  # nine letters and digits, as Mistral's templates demand
_CALL = ToolCall("lookup", {"key": "pearl"}, _CALL_IDS[0])
_REPLIES = {
    "an answer": Message("assistant", _ANSWER),
    "a call": Message("assistant", "", tool_calls=(_CALL,)),
    "a call beside text": Message("assistant", "I look it up.", tool_calls=(_CALL,)),
}


def check_template(model: ModelFiles) -> TemplateReport:
    renderer = model.renderer(default_authors())
    cases = tuple(_case(renderer, model, *case) for case in _CASES)
    return TemplateReport(cases, _parts(renderer, model.template), _parser(model.template))


def _parts(renderer: Renderer, template: ChatTemplate) -> dict[str, str | None]:
    (system, asked), tools = _conversation("su", "none"), (LOOKUP,)
    refused = hidden_message(template, (system, asked), tools)
    learned = ((kind, _refused(renderer, reply, tools)) for kind, reply in _REPLIES.items())
    openings = [(asked,), (system, asked)] if refused is None else [(asked,)]
    return {
        "system messages": refused,
        "tools": next(filter(None, (hidden_tools(template, tools, opening) for opening in openings)), None),
        "calls": hidden_calls(template),
        "results": hidden_result(template, (asked,), tools),
        "thoughts": _refused(renderer, Message("assistant", _ANSWER, reasoning="Which record was it?")),
        "demonstrations": next((f"{kind}: {why}" for kind, why in learned if why is not None), None),
    }


def _refused(renderer: Renderer, reply: Message, tools: Sequence[Mapping[str, Any]] = ()) -> str | None:
    """Why nobody can demonstrate this reply. None: a run learns the whole reply."""
    try:
        renderer.reply(renderer.render([_ASKING["u"]], tools), reply)
    except ValueError as error:
        return str(error)
    return None


def _parser(template: ChatTemplate) -> str:
    try:
        return auto_parser(template, (LOOKUP,))
    except ValueError as error:
        return str(error)


def _case(renderer: Renderer, model: ModelFiles, name: str, plan: str, thinking: Thinking, tools: bool) -> Case:
    messages = [*_conversation(plan, thinking)]
    schemas = (LOOKUP,) if tools else ()
    found: list[str] = []
    replies = [index for index, letter in enumerate(plan) if letter in "acpe"]
    try:
        first = renderer.render(messages[: replies[0]], schemas)
        renderer.tokens(first)
        if plan == "uau" and tools and (problem := hidden_tools(model.template, schemas, messages[: replies[0]])):
            raise RenderError(problem)
        for reply, end in pairwise([*replies, len(plan)]):
            before = renderer.render(messages[:reply], schemas, after=first)
            grown = renderer.render(messages[:end], schemas, after=before)
            if renderer.increment(before, grown, Sampled("", _stop(renderer, before, grown))) is None:
                thought = messages[reply].reasoning
                lost = thought is not None and not (thought and thought in grown.written.text)
                what = ": its thinking is left out" if lost else " or one before it: is written differently"
                found.append(f"message {reply} (assistant){what}")
    except ValueError as error:
        return Case(name, "unsupported", (str(error),))
    state: State = "rewrites history" if found else "append-only"
    try:
        renderer.initial(messages, schemas)
    except ValueError as error:
        found.append(f"can't be shown again once rewritten: {error}")
    return Case(name, state, tuple(found))


def _stop(renderer: Renderer, before: Rendering, grown: Rendering) -> int | None:
    """The stop token in which a policy ends its reply if it writes like the template."""
    tail = grown.written.text[len(before.written.text) :]
    return next((found.token for found in renderer.codec.controls(tail) if found.token in renderer.stop_ids), None)


def _conversation(plan: str, thinking: Thinking) -> Iterator[Message]:
    """A message for each letter: s(ystem), u(ser), a(nswer), c(all), p(arallel calls), r(esult), e(mpty)."""
    for index, letter in enumerate(plan):
        if letter in _ASKING:
            yield _ASKING[letter]
        elif letter == "r":
            second = plan[: index + 1].rpartition("p")[2] == "rr"
            yield Message("tool", '{"next": "arrow"}', "env", name="lookup", tool_call_id=_CALL_IDS[second])
        else:
            thought = {"none": None, "empty": "", "some": f"Which record was it, {index}?"}[thinking]
            ids = _CALL_IDS[: "acp".find(letter)] if letter in "cp" else ()
            calls = tuple(ToolCall("lookup", {"key": "pearl"}, call_id) for call_id in ids)
            said = _ANSWER if letter == "a" else ""
            yield Message("assistant", said, "initialization", calls, reasoning=thought)
