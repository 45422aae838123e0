"""Messages -> exact tokens with their authors. The only place where a chat template is applied."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, cached_property, lru_cache
from itertools import count, groupby
from typing import Any

import numpy as np

from context.authors import TEMPLATE, AuthorTable
from context.messages import Change, Message, check_message
from context.parse import PARSERS
from context.parse.reply import before_stop
from context.templates.chat_template import ChatTemplate, RenderError
from context.templates.hidden_parts import HIDDEN_THOUGHTS, hidden_calls, hidden_text, left_out
from context.templates.rendering import marks
from context.templates.rendering.contents import Content, Row, contents, first_place, row, tool_rows, with_thought
from context.templates.rendering.demonstrated_turns import turn_spans, written_reply
from context.templates.rendering.marks import Span, Written
from context.templates.rendering.own_controls import Again, marking, own_controls
from context.templates.rendering.reply_end import Ended, Sampled, Shown, Tail, is_as_sampled, reply_end
from context.tokens.codec import Control, Piece, TokenCodec
from context.tokens.token_sequence import TokenSequence
from context.wording import storable

_Tools = Sequence[Mapping[str, Any]]
_THOUGHT_OPENINGS = {opening for parser in PARSERS.values() for opening, _ in parser.thinking}
_MOST_PIECES = 4096
"""Texts whose tokens are kept: what is shown again is not tokenised again."""


@dataclass(frozen=True)
class Rendering:
    """A conversation as its template writes it, up to where the next reply begins."""

    given: tuple[Message, ...]
    messages: tuple[Message, ...]
    """What was given, thoughts apart from contents where the template knows thoughts."""
    rows: tuple[Row, ...]
    """What the template was given, as are `tools`."""
    tools: _Tools
    written: Written
    now: datetime
    """What the template takes for today; it stays the same while a conversation grows."""

    @property
    def opened_thought(self) -> str:
        """The end of the prompt that opens a thought for the policy; empty where none is opened."""
        text = self.written.text.rstrip()
        opening = next((opening for opening in _THOUGHT_OPENINGS if text.endswith(opening)), "")
        return self.written.text[text.rfind(opening) :] if opening else ""


_Placed = tuple[int, Content, Span | None]
"""A content of the message of that number, and where it stands; None: nowhere."""


class Renderer:
    """Turns messages into tokens so that no content can become a control token.

    The tokens are those of the whole text, as transformers makes them: it is cut only at control tokens that the
    template wrote. A content that spells one is encoded by a tokenizer that knows none. Each content's tokens carry
    its message's author, all else `template`; a token across a border belongs to the author of its first character.
    An action author's assistant message is a reply in the policy's place: all of its turn is its author's, from behind
    the generation prompt to the stop token. What the policy sampled is never rendered: after a reply, only what the
    template writes behind the reply's stop token is.
    """

    def __init__(
        self,
        codec: TokenCodec,
        template: ChatTemplate,
        *,
        authors: AuthorTable,
        stop_ids: frozenset[int],
        stop_strings: tuple[str, ...] = (),
        allow_hidden: bool = False,
    ) -> None:
        """`allow_hidden`: calls, results and parts of replies that the template leaves out are no error.

        Raises RenderError for a template that does not write its control tokens whole.
        """
        self.codec = codec
        self.authors = authors
        self.stop_ids = stop_ids
        """Tokens that end a reply: the template's end of turn and the model's eos."""
        self.end_ids = stop_ids & codec.added_ids or stop_ids
        """Those of them that end a reply that was written, not sampled: a model may name a plain token as its eos."""
        self.stop_strings = stop_strings
        """Texts that end a reply, for models without an end of turn of their own."""
        self.template = template
        self._stops = {token: codec.decode([token]) for token in self.end_ids}
        self._template_code = authors.code(TEMPLATE)
        # A template that looks for its own control tokens in contents finds none, and no thought there.
        self._marking = marking(template, codec)
        self._allow_hidden = allow_hidden
        self._thoughts_are_controls = bool(codec.controls("</think>"))
        self._piece = lru_cache(_MOST_PIECES)(
            lambda text, control, opens: codec.piece(storable(text), control, opens=opens)
        )

    def initial(self, messages: Sequence[Message], tools: _Tools | None = None) -> TokenSequence:
        """The whole first prompt, with the generation prompt."""
        return self.tokens(self.render(messages, tools or ()))

    def render(
        self, messages: Sequence[Message], tools: _Tools, *, after: Rendering | None = None, now: datetime | None = None
    ) -> Rendering:
        """The text of a prompt; `after` is one of the same conversation, earlier. `now`: what is today, else."""
        given, now = tuple(messages), (now or datetime.now()) if after is None else after.now
        shown, rows = [], []
        if after is not None and given[: len(after.given)] == after.given:
            shown, rows = [*after.messages], [*after.rows]
        for message in given[len(shown) :]:
            shown.append(self._read(message))
            rows.append(row(shown[-1] if self._thoughts_are_controls else message, storable, storable))
        tools = tool_rows(tools, storable, storable)
        written = self._write(rows, tools, now=now, before=None if after is None else after.written)
        return Rendering(given, tuple(shown), tuple(rows), tools, written, now)

    def tokens(self, rendering: Rendering) -> TokenSequence:
        written = rendering.written
        called = next((number for number, message in enumerate(rendering.messages) if message.tool_calls), None)
        if called is not None and self._hidden_calls and not self._allow_hidden:
            raise RenderError(self._hidden_calls)  # arguments that are no texts are not looked for
        spans = [span for _, _, span in self._placed(rendering, 0, 0) if span is not None]
        speakers = {
            place: message.author
            for place, message in enumerate(rendering.messages)
            if message.role == "assistant" and self.authors.author(message.author).action
        }
        if speakers:
            spans = [*self._turns(rendering, speakers), *spans]
        return self._encode(written.text, self._controls(rendering, written), spans)

    def increment(self, before: Rendering, grown: Rendering, sampled: Sampled) -> TokenSequence | None:
        """What follows the reply that answered `before`: the rest of its turn, the messages behind it, the next prompt.

        `grown` shows the reply and them too. None where the template writes again what stands already, before the
        reply or in it.
        """
        written = grown.written.rest(before.written)
        if written is None:
            return None
        reply, length = len(before.messages), len(before.written.text)
        text, controls = written.text, self._controls(grown, written)
        known = is_as_sampled(text, controls, self._stops, sampled.text)
        placed = self._placed(grown, reply + known, length, required=reply + 1)
        spans = [
            Span(span.first - length, span.end - length, span.author)
            for number, _, span in placed
            if span is not None and number > reply
        ]
        said = [(content, span) for number, content, span in placed if number == reply]
        shown_end = max((span.end for _, span in said if span is not None), default=length) - length
        shown = None if known else Shown(shown_end, tuple(content.text for content, span in said if span is None))
        tail = Tail(text, controls, min((span.first for span in spans), default=len(text)))
        end = reply_end(tail, grown.messages[reply], shown, self._stops, sampled, self._ended(before, grown))
        if end is None:
            return None
        return self._encode(text, controls, spans, start=end[0], lead=end[1], opens=False)

    def said(self, token_ids: Sequence[int]) -> tuple[Sampled, bool]:
        """A sampled reply as text, without what ended it, and whether something did."""
        if token_ids[-1] in self.stop_ids:
            return Sampled(self.codec.decode(token_ids[:-1], opens=True), token_ids[-1]), True
        text = self.codec.decode(token_ids, opens=True)
        before = before_stop(text, self.stop_strings)
        return Sampled(text if before is None else before, None), before is not None

    def reply(self, message: Message) -> list[int]:
        """The tokens of a reply as the template writes it, its stop token last: what a policy says to say this.

        For replies that nobody sampled here: a teacher's, a demonstrator's. Contents become no control token.
        Raises RenderError where the template leaves out some of it, unless that is allowed.
        """
        message = self._read(message)
        messages = (Message("user", "x"), message)

        def write(rows: Sequence[Row]) -> tuple[Written, Written]:
            return written_reply(self._marking, rows, self.codec, self.stop_ids)

        lead, said = write([row(one, storable, storable) for one in messages])
        if self._thoughts_are_controls and with_thought(message) is not message:  # its marks would be plain text
            hidden: str | None = HIDDEN_THOUGHTS
        else:
            hidden = (message.tool_calls and self._hidden_calls) or hidden_text(message, said.text)
            # What is said twice, in a thought and in the answer, may be shown once.
            other = replace(message, reasoning=message.reasoning and "zq0zq", content=message.content and "zq1zq")
            shown = write([row(one, storable, storable) for one in (messages[0], other)])[1]
            hidden = hidden or hidden_text(other, shown.text)
        if hidden and not self._allow_hidden:
            raise RenderError(hidden)
        again = _again(messages, (), lambda rows, _: "".join(part.text for part in write(rows)))
        whole, length = lead + said, len(lead.text)
        controls = own_controls(whole, self.codec, again)
        ids: list[int] = self._encode(whole.text, controls, []).token_ids.tolist()
        asked = self._encode(lead.text, [c for c in controls if c.end <= length], []).token_ids.tolist()
        if ids[: len(asked)] == asked:
            ids = ids[len(asked) :]
        else:  # its first token would begin in the prompt, which a policy can't sample
            behind = [Control(c.token, c.first - length, c.end - length) for c in controls if c.first >= length]
            ids = self._encode(said.text, behind, [], opens=False).token_ids.tolist()
        end = next((place for place, token in enumerate(ids) if token in self.end_ids), None)
        if end is None:
            raise RenderError("chat template must end a reply with a stop token, got one that does not.")
        return ids[: end + 1]

    def count(self, message: Message) -> int:
        """Tokens of a message's contents; what the template writes around them is not counted."""
        return sum(len(self._piece(content.text, None, False).ids) for content in contents(message))

    @cached_property
    def _hidden_calls(self) -> str | None:
        return hidden_calls(self.template)

    def _ended(self, before: Rendering, grown: Rendering) -> Ended:
        reply, rows = len(before.messages), grown.rows

        @cache
        def ended(thought: str | None) -> str | None:
            last = rows[reply] if thought is None else {**rows[reply], "reasoning_content": thought}
            try:
                text = self._write((*rows[:reply], last), grown.tools, generation_prompt=False, now=grown.now).text
            except RenderError:
                return None
            return text.removeprefix(before.written.text)

        return ended

    def _controls(self, rendering: Rendering, written: Written) -> list[Control]:
        """The control tokens that the template wrote in `written`, the end of the rendering."""

        def write(rows: Sequence[Row], tools: _Tools) -> str:
            return self._write(rows, tools, now=rendering.now).text

        messages = rendering.messages if self._thoughts_are_controls else rendering.given
        again = _again(messages, rendering.tools, write)
        before = rendering.written.text[: len(rendering.written.text) - len(written.text)]
        return own_controls(written, self.codec, again, before=before)

    def _read(self, message: Message) -> Message:
        check_message(message)
        return with_thought(message) if self.template.knows_thoughts else message

    def _write(
        self,
        rows: Sequence[Row],
        tools: _Tools,
        *,
        now: datetime | None = None,
        generation_prompt: bool = True,
        before: Written | None = None,
    ) -> Written:
        text = self._marking.render(rows, tools=tools, generation_prompt=generation_prompt, now=now)
        return Written(text, before)

    def _placed(self, rendering: Rendering, first: int, start: int, *, required: int = 0) -> list[_Placed]:
        """Places of contents from message `first` on, behind `start`; RenderError: one from `required` on has none."""
        text = rendering.written.text
        shown = list(enumerate(rendering.messages))[first:]
        wanted = [(number, content) for number, message in shown for content in contents(message)]
        marked, _ = self._numbered(rendering, first)
        clean, places = marks.numbered_spans(marked)
        if clean != text:  # a template that looks at how contents begin or end
            places = _in_turn(text, wanted, start)
        placed: list[_Placed] = []
        for place, (number, content) in enumerate(wanted):
            may_miss = self._allow_hidden and rendering.messages[number].role in ("assistant", "tool")
            if content.required and number >= required and place not in places and not may_miss:
                raise RenderError(left_out(number, rendering.messages[number].role))
            placed.append((number, content, Span(*places[place], content.author) if place in places else None))
        return placed

    def _numbered(self, rendering: Rendering, first: int) -> tuple[str, tuple[Row, ...]]:
        """The text with a mark before and behind each content of the messages from `first` on; and its rows."""
        numbers = count()

        def numbered(text: str) -> str:
            number, text = next(numbers), storable(text)
            inner = text.strip()
            before, _, behind = text.partition(inner)
            return before + marks.begin(number) + inner + marks.end(number) + behind

        rows = (*rendering.rows[:first], *(row(message, numbered, storable) for message in rendering.messages[first:]))
        return self._write(rows, rendering.tools, now=rendering.now).text, rows

    def _turns(self, rendering: Rendering, speakers: Mapping[int, str]) -> list[Span]:
        """The turns of those who speak in the policy's place."""
        marked, rows = self._numbered(rendering, 0)
        if marks.numbered_spans(marked)[0] != rendering.written.text:
            raise RenderError(
                "chat template must write an action author's message whatever it begins or ends with, got one that "
                "does not. Use author 'initialization', or another template."
            )

        def write(count: int, prompted: bool) -> str:
            return self._write(rows[:count], rendering.tools, now=rendering.now, generation_prompt=prompted).text

        return turn_spans(marked, write, speakers, self.codec, self.stop_ids)

    def _encode(
        self,
        text: str,
        controls: Sequence[Control],
        spans: Sequence[Span],
        *,
        start: int = 0,
        lead: Control | None = None,
        opens: bool = True,
    ) -> TokenSequence:
        """Tokens from `start` on, or from behind `lead`, the control token before it."""
        cuts = [found for found in controls if found.first >= start]
        heads: list[Control | None] = [*([lead] if lead else []), *cuts]
        firsts = [start if found is None else found.first for found in heads]
        if not heads or (lead is None and firsts[0] > start):
            heads, firsts = [None, *heads], [start, *firsts]
        ends = [*firsts[1:], len(text)]
        pieces: list[Piece] = []
        for head, first, end in zip(heads, firsts, ends, strict=True):
            within = None if head is None else Control(head.token, head.first - first, head.end - first)
            pieces.append(self._piece(text[first:end], within, opens and first == 0))
        codes = [np.full(len(piece.ids), self._template_code, np.uint8) for piece in pieces]
        for span in spans:
            for place in range(max(0, bisect_right(firsts, span.first) - 1), bisect_left(firsts, span.end)):
                piece, first = pieces[place], firsts[place]
                last = len(piece.ids) if span.end >= ends[place] else piece.token_from(span.end - first)
                codes[place][piece.token_from(span.first - first) : last] = self.authors.code(span.author)
        skipped = 0 if lead is None else 1
        return TokenSequence.unsampled(
            np.concatenate([piece.ids for piece in pieces])[skipped:], np.concatenate(codes)[skipped:]
        )


def _again(messages: Sequence[Message], tools: _Tools, write: Callable[[Sequence[Row], _Tools], str]) -> Again:
    def given(leaf: Change) -> tuple[list[Row], list[Any]]:
        return [row(message, leaf, leaf) for message in messages], tool_rows(tools, leaf, leaf)

    def again(leaf: Change) -> str | None:
        changed = given(lambda text: leaf(storable(text)))
        return None if changed == given(storable) else write(*changed)

    return again


def _in_turn(text: str, wanted: Sequence[tuple[int, Content]], start: int) -> dict[int, tuple[int, int]]:
    """Each content's first place behind the message before, that no longer one of its message has."""
    found: dict[int, tuple[int, int]] = {}
    at = start
    for _, group in groupby(range(len(wanted)), lambda number: wanted[number][0]):
        taken: list[tuple[int, int]] = []
        for number in sorted(group, key=lambda number: -len(wanted[number][1].text)):
            content = wanted[number][1].text
            place = first_place(text, content, at)  # a template may sort arguments
            while place is not None and any(a < place[1] and place[0] < b for a, b in taken):
                place = first_place(text, content, place[0] + 1)
            if place is not None:
                found[number] = place
                taken.append(place)
        at = max((end for _, end in taken), default=at)
    return found
