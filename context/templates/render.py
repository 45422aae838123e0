"""Messages -> exact tokens with their authors. The only place where a chat template is applied."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property, lru_cache
from itertools import count
from typing import Any

import numpy as np

from context.authors import TEMPLATE, AuthorTable
from context.messages import Message, check_message
from context.parse import PARSERS, ReplyParser
from context.parse.choose import reply_parser, shared_opening
from context.parse.reply import before_stop
from context.templates.chat_template import ChatTemplate, RenderError
from context.templates.hidden_parts import HIDDEN_THOUGHTS, hidden_calls, left_out, unlike
from context.templates.rendering import marks
from context.templates.rendering.contents import Content, Row, contents, places_in_turn, row, tool_rows, with_thought
from context.templates.rendering.marks import Span, Written
from context.templates.rendering.own_controls import marking, own_controls, rendered_again
from context.templates.rendering.reply_end import Ended, Sampled, Shown, Tail, is_as_sampled, reply_end
from context.tokens.codec import Control, Piece, TokenCodec
from context.tokens.token_sequence import TokenSequence
from context.wording import storable

_Tools = Sequence[Mapping[str, Any]]
_THOUGHT_OPENINGS = {opening for parser in PARSERS.values() for opening, _ in parser.thinking}
_FOLLOWING = "q7following7q"
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
    prompted: bool = True
    """False: it ends with its last message."""

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
        self._takes_thoughts_apart = self._thoughts_are_controls and template.reads_thoughts
        self._piece = lru_cache(_MOST_PIECES)(
            lambda text, control, opens: codec.piece(storable(text), control, opens=opens)
        )

    def initial(self, messages: Sequence[Message], tools: _Tools | None = None) -> TokenSequence:
        """The whole first prompt, with the generation prompt."""
        return self.tokens(self.render(messages, tools or ()))

    def render(
        self,
        messages: Sequence[Message],
        tools: _Tools,
        *,
        after: Rendering | None = None,
        now: datetime | None = None,
        prompted: bool = True,
    ) -> Rendering:
        """The text of a prompt; `after` is one of the same conversation, earlier. `now`: what is today, else."""
        given, now = tuple(messages), (now or datetime.now()) if after is None else after.now
        shown, rows = [], []
        if after is not None and given[: len(after.given)] == after.given:
            shown, rows = [*after.messages], [*after.rows]
        for message in given[len(shown) :]:
            shown.append(self._read(message))
            rows.append(row(shown[-1] if self._takes_thoughts_apart else message, storable, storable))
        tools = tool_rows(tools, storable, storable)
        before = None if after is None else after.written
        written = self._write(rows, tools, now=now, generation_prompt=prompted, before=before)
        return Rendering(given, tuple(shown), tuple(rows), tools, written, now, prompted)

    def tokens(self, rendering: Rendering) -> TokenSequence:
        written = rendering.written
        called = next((number for number, message in enumerate(rendering.messages) if message.tool_calls), None)
        if called is not None and self._hidden_calls and not self._allow_hidden:
            raise RenderError(self._hidden_calls)  # arguments that are no texts are not looked for
        placed = self._placed(rendering, 0, 0)
        spans = [span for _, _, span in placed if span is not None]
        speakers = {
            place: message.author
            for place, message in enumerate(rendering.messages)
            if message.role == "assistant" and self.authors.author(message.author).action
        }
        if speakers:
            spans = [*self._turns(rendering, speakers, placed), *spans]
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

    def reply(self, prompt: Rendering, message: Message, parser: ReplyParser | None = None) -> list[int]:
        """The tokens with which the template answers `prompt` by this message, its stop token last.

        For replies that nobody sampled here: a teacher's, a demonstrator's. Contents become no control token. What
        `parser` reads in the tokens (by default the template's own) is the message; RenderError says what is not,
        unless the template may leave it out.
        """
        whole = self.render((*prompt.given, message), prompt.tools, after=prompt, prompted=False)
        controls = self._controls(whole, whole.written)
        text, cut = whole.written.text, self._reply_begins(prompt, whole.written.text)
        ids = self._behind(text, cut, controls)
        end = next((place for place, token in enumerate(ids) if token in self.end_ids), None)
        if end is None:  # the next turn's first token ends it
            text = text[: max(cut, len(text.rstrip()))]
            ids = [*self._behind(text, cut, [c for c in controls if c.end <= len(text)]), self._next_header(whole)]
        ids = ids if end is None else ids[: end + 1]
        self._read_back(prompt, message, ids, parser)
        return ids

    def _read_back(self, prompt: Rendering, message: Message, ids: Sequence[int], parser: ReplyParser | None) -> None:
        """RenderError where the tokens are not read as the message; what is left out of it may be allowed."""
        needs_calls = bool(message.tool_calls) and not self._allow_hidden
        reader = parser or reply_parser(self.template, prompt.tools, calls=needs_calls)
        read = reader.parse(prompt.opened_thought + self.said(ids)[0].text, stopped=True)
        is_spelled = self._thoughts_are_controls and with_thought(message) is not message
        if is_spelled and self.codec.token_id("</think>") not in ids:
            problem: str | None = HIDDEN_THOUGHTS  # its marks are plain text
        else:
            problem = unlike(with_thought(message), read, opened=prompt.opened_thought)
        if problem is not None and (read.outcome == "malformed" or not self._allow_hidden):
            raise RenderError(problem)

    def _reply_begins(self, prompt: Rendering, text: str, *, behind: tuple[int, int] = (0, 0)) -> int:
        """The character of `text`, which goes on from the prompt by a reply, from which on the reply is the policy's.

        It is where the prompt ends. A template may write into a prompt what it leaves out before replies that were
        said, such as an empty thought: there the reply begins where they part, if that is at a control token.
        `behind`: places in the prompt and in the text, behind which both are compared.
        """
        asked, (start, start_in_text) = prompt.written.text, behind
        moved = start_in_text - start
        if text.startswith(asked[start:], start_in_text):
            return len(asked) + moved
        shared = start + len(shared_opening(asked[start:], text[start_in_text:]))
        controls = self._controls(prompt, prompt.written)
        if not asked[shared:].strip() and any(c.end == shared for c in controls):  # white space behind a thought's mark
            return shared + moved
        unprompted = self._write(prompt.rows, prompt.tools, now=prompt.now, generation_prompt=False).text
        said = max((span.end for _, _, span in self._placed(prompt, 0, 0) if span is not None), default=0)
        parted = next((c for c in controls if said <= c.first <= shared < c.end), None)
        if parted is None or parted.first <= len(unprompted) < len(asked):
            raise RenderError(
                "chat template must begin a reply as it does when it asks for one, got a prompt that ends in "
                f"{asked[shared:][-60:]!r} where the reply has {text[shared + moved :][:60]!r}. Set "
                "context.template_args (enable_thinking), context.template: hermes, or another template."
            )
        return parted.first + moved

    def _behind(self, text: str, cut: int, controls: Sequence[Control]) -> list[int]:
        """The tokens of the text from a character on, as they follow those before it."""
        lead = next((c for c in reversed(controls) if c.end <= cut), None)
        start = 0 if lead is None else lead.end

        def encoded(end: int) -> list[int]:
            within = [c for c in controls if c.end <= end]
            ids: list[int] = self._encode(text[:end], within, [], start=start, lead=lead).token_ids.tolist()
            return ids

        asked, ids = encoded(cut), encoded(len(text))
        if ids[: len(asked)] == asked:
            return ids[len(asked) :]
        # Its first token would begin in the prompt, which a policy can't sample.
        behind = [Control(c.token, max(c.first - cut, 0), c.end - cut) for c in controls if c.end > cut]
        found: list[int] = self._encode(text[cut:], behind, [], opens=False).token_ids.tolist()
        return found

    def _next_header(self, whole: Rendering) -> int:
        """The token that opens the turn behind a reply, where that is what ends the reply."""
        calls = whole.given[-1].tool_calls
        following = Message("user", _FOLLOWING)
        if calls:
            following = Message("tool", _FOLLOWING, "env", name=calls[0].name, tool_call_id=calls[0].id)
        try:
            grown = self.render((*whole.given, following), whole.tools, after=whole, prompted=False)
        except RenderError:
            controls = []
        else:
            place = grown.written.text.rfind(_FOLLOWING)
            controls = [c for c in self._controls(grown, grown.written) if c.end <= place and c.token in self.end_ids]
        if not controls:
            raise RenderError("chat template must end a reply with a stop token, got one that does not.")
        return controls[-1].token

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
            return self._write(rows, tools, now=rendering.now, generation_prompt=rendering.prompted).text

        messages = rendering.messages if self._takes_thoughts_apart else rendering.given
        again = rendered_again(messages, rendering.tools, write)
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
        clean, places = marks.numbered_spans(self._numbered(rendering, first))
        if clean != text:  # a template that looks at how contents begin or end
            places = places_in_turn(text, wanted, start)
        placed: list[_Placed] = []
        for place, (number, content) in enumerate(wanted):
            may_miss = self._allow_hidden and rendering.messages[number].role in ("assistant", "tool")
            if content.required and number >= required and place not in places and not may_miss:
                raise RenderError(left_out(number, rendering.messages[number].role))
            placed.append((number, content, Span(*places[place], content.author) if place in places else None))
        return placed

    def _numbered(self, rendering: Rendering, first: int) -> str:
        """The text with a mark before and behind each content of the messages from `first` on."""
        numbers = count()

        def numbered(text: str) -> str:
            number, text = next(numbers), storable(text)
            inner = text.strip()
            before, _, behind = text.partition(inner)
            return before + marks.begin(number) + inner + marks.end(number) + behind

        rows = (*rendering.rows[:first], *(row(message, numbered, storable) for message in rendering.messages[first:]))
        return self._write(rows, rendering.tools, now=rendering.now, generation_prompt=rendering.prompted).text

    def _turns(self, rendering: Rendering, speakers: Mapping[int, str], placed: Sequence[_Placed]) -> list[Span]:
        """The turns of those who speak in the policy's place: from the end of the prompt for each to its stop token.

        A template that ends earlier turns with no stop token has them end with their last content.
        """
        text, controls = rendering.written.text, self._controls(rendering, rendering.written)
        turns = []
        for number, author in speakers.items():
            prompt = self.render(rendering.given[:number], rendering.tools, now=rendering.now)
            if not prompt.written.text:  # no token before it could predict the first one
                raise RenderError(
                    "chat template must write something before an action author's message, got nothing. Begin with "
                    "another one."
                )
            # What is before the last content, a template may write in another way once more is said.
            before = zip(self._placed(prompt, 0, 0), placed, strict=False)
            ends = [(was[2].end, now[2].end) for was, now in before if was[2] is not None and now[2] is not None]
            first = self._reply_begins(prompt, text, behind=max(ends, default=(0, 0)))
            said = max((span.end for n, _, span in placed if n == number and span is not None), default=first)
            following = min((span.first for n, _, span in placed if n > number and span is not None), default=len(text))
            stops = (c.end for c in controls if c.token in self.end_ids and first <= c.first and c.end <= following)
            end = next(stops, said)
            if end < said:
                raise RenderError(
                    "chat template must write an action author's message in one turn, got one that closes it before "
                    f"{text[end:said][-40:]!r}. Use author 'initialization', or another template."
                )
            turns.append(Span(first, end, author))
        return turns

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
