"""Writes conversations with their template, and finds which parts of the text are the template's and which are
contents.

    messages     user: Which code?
    text         <|user|>Which code?<|end|><|assistant|>
    controls     <|user|>, <|end|> and <|assistant|>, which the template wrote
    contents     characters 8 to 18 are the content of message 0

An episode writes every message again at each turn. If a text continues an earlier one, only its new part is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, partial
from itertools import count
from typing import Any

from context.messages import Change, Message, check_message
from context.parse import PARSERS
from context.templates.chat_template import ChatTemplate, RenderError
from context.templates.hidden_parts import left_out
from context.templates.rendering.contents import PlacedContent, Row, place_contents, row, tool_rows, with_thought
from context.templates.rendering.own_controls import find_own_controls, mark_controls
from context.templates.rendering.reply_end import AsLast
from context.templates.rendering.token_writer import Passage
from context.templates.rendering.written_text import Written, mark_content
from context.tokens.codec import Control, TokenCodec
from context.wording import storable

Tools = Sequence[Mapping[str, Any]]
_THOUGHT_OPENINGS = {opening for parser in PARSERS.values() for opening, _ in parser.thinking}


@dataclass(frozen=True)
class Rendering:
    """A conversation as its template writes it, up to where the next reply begins."""

    given: tuple[Message, ...]
    messages: tuple[Message, ...]
    """The messages given, with thoughts apart from contents where the template knows thoughts."""
    rows: tuple[Row, ...]
    """The messages in the form that the template was given, as are `tools`."""
    tools: Tools
    written: Written
    now: datetime
    """The day that the template takes for today. It stays the same while a conversation grows."""
    prompted: bool = True
    """False: the text ends with its last message."""

    @property
    def opened_thought(self) -> str:
        """The end of the prompt that opens a thought for the policy. Empty: the prompt opens none."""
        text = self.written.text.rstrip()
        opening = next((opening for opening in _THOUGHT_OPENINGS if text.endswith(opening)), "")
        return self.written.text[text.rfind(opening) :] if opening else ""


def passages_of(placed: Sequence[PlacedContent]) -> list[Passage]:
    """The parts of a text that are contents, each by its author."""
    return [Passage(each.place, each.content.author) for each in placed if each.place is not None]


class ConversationWriter:
    """Writes conversations with the template, and finds the template's parts and the contents in the text."""

    def __init__(self, template: ChatTemplate, codec: TokenCodec, *, allow_hidden: bool) -> None:
        self._template = template
        self._codec = codec
        self._allow_hidden = allow_hidden
        # A template that looks for its own control tokens in contents finds none, and no thought there.
        self._marking = mark_controls(template, codec)
        self._takes_thoughts_apart = template.reads_thoughts and bool(codec.controls("</think>"))

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools,
        *,
        after: Rendering | None = None,
        now: datetime | None = None,
        prompted: bool = True,
    ) -> Rendering:
        """Write a conversation's text on the day of `after`, an earlier text of it. Without it the day is `now`."""
        given, now = tuple(messages), (now or datetime.now()) if after is None else after.now
        shown, rows = [], []
        if after is not None and given[: len(after.given)] == after.given:
            shown, rows = [*after.messages], [*after.rows]
        for message in given[len(shown) :]:
            check_message(message)
            shown.append(with_thought(message) if self._template.knows_thoughts else message)
            rows.append(row(shown[-1] if self._takes_thoughts_apart else message, storable, storable))
        tools = tool_rows(tools, storable, storable)
        marked = self._marking.render(rows, tools=tools, generation_prompt=prompted, now=now)
        written = Written(marked, None if after is None else after.written)
        return Rendering(given, tuple(shown), tuple(rows), tools, written, now, prompted)

    def find_controls(self, rendering: Rendering, tail: Written | None = None) -> list[Control]:
        """Find the control tokens that the template wrote; with `tail`, only those in this end of the text."""
        messages = rendering.messages if self._takes_thoughts_apart else rendering.given

        def ask_again(change: Change) -> str | None:
            def leaf(text: str) -> str:
                return change(storable(text))

            rows = tuple(row(each, leaf, leaf) for each in messages)
            changed = replace(rendering, rows=rows, tools=tool_rows(rendering.tools, leaf, leaf))
            return None if changed == rendering else self._write_again(changed)

        text, tail = rendering.written.text, tail or rendering.written
        before = text[: len(text) - len(tail.text)]
        return find_own_controls(tail, self._codec, ask_again, before=before)

    def find_contents(
        self, rendering: Rendering, first: int = 0, start: int = 0, *, required: int = 0
    ) -> list[PlacedContent]:
        """Find the contents from message `first` on, in the text from character `start` on.

        Raises RenderError if the template leaves out a content of message `required` or a later message.
        """
        shown = list(enumerate(rendering.messages))[first:]
        write_marked = partial(self._write_with_marks, rendering, first)
        placed = place_contents(rendering.written.text, shown, start, write_marked)
        for each in placed:
            role = rendering.messages[each.message].role
            may_miss = self._allow_hidden and role in ("assistant", "tool")
            if each.place is None and each.content.required and each.message >= required and not may_miss:
                raise RenderError(left_out(each.message, role))
        return placed

    def write_unprompted(self, prompt: Rendering) -> str:
        """The text of a prompt without the beginning of a reply."""
        return self._write_again(replace(prompt, prompted=False))

    def write_as_last(self, before: Rendering, grown: Rendering) -> AsLast:
        """Make a function that writes as last message the reply to the prompt `before`, as `grown` shows the reply."""
        reply, rows = len(before.messages), grown.rows

        @cache
        def as_last(thought: str | None) -> str | None:
            last = rows[reply] if thought is None else {**rows[reply], "reasoning_content": thought}
            try:
                text = self._write_again(replace(grown, rows=(*rows[:reply], last), prompted=False))
            except RenderError:
                return None
            return text.removeprefix(before.written.text)

        return as_last

    def _write_with_marks(self, rendering: Rendering, first: int) -> str:
        """The text with a numbered mark around each content of the messages from `first` on."""
        numbers = count()

        def mark(text: str) -> str:
            return mark_content(storable(text), next(numbers))

        rows = (*rendering.rows[:first], *(row(message, mark, storable) for message in rendering.messages[first:]))
        return self._write_again(replace(rendering, rows=rows))

    def _write_again(self, given: Rendering) -> str:
        """Write the text of a rendering with other rows or tools."""
        marked = self._marking.render(given.rows, tools=given.tools, generation_prompt=given.prompted, now=given.now)
        return Written(marked).text
