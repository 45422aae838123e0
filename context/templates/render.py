"""Messages -> exact tokens with their authors. The only place where a chat template is applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from context.authors import TEMPLATE, AuthorTable
from context.messages import Message, to_template
from context.templates.chat_template import ChatTemplate, RenderError
from context.templates.demonstrated_turns import Around, cut_pieces, turn_span
from context.templates.placeholders import REPLY, Piece, Row, Slots, openings, outline, read_along
from context.templates.template_probe import Event, Thinking, changes, mark, rewrites_history
from context.tokens.codec import TokenCodec
from context.tokens.token_sequence import NOT_SAMPLED, TokenSequence

__all__ = ["ChatTemplate", "RenderError", "Renderer", "TokenCodec"]
_MAX_CACHED = 1024
_MAX_CACHED_CHARS = 8_000_000
"""Characters of contents: a conversation that is shown anew is not tokenised anew."""
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class _Plan:
    """What a template writes around any contents of one shape."""

    opening: tuple[Row, ...]
    """Made-up turns to be rendered before the messages."""
    skipped: str
    """Rendered text that comes before what is wanted."""
    pieces: tuple[Piece, ...]
    demonstrated: Mapping[int, str] = field(default_factory=dict)
    """Place in `pieces` -> author, of template text that is part of what a message's author had to write."""


class Renderer:
    """Turns messages into tokens so that no content can become a control token.

    Template text is encoded with control tokens, contents without them; each content's tokens carry its
    message's author, all else `template`. An action author's assistant message is a reply in the policy's place:
    all of its turn is its author's, from behind the generation prompt to the stop token. What the policy sampled
    is never rendered: after a reply, only what the template writes behind the reply's stop token is.
    """

    def __init__(
        self,
        codec: TokenCodec,
        template: ChatTemplate,
        *,
        authors: AuthorTable,
        stop_ids: frozenset[int],
        stop_strings: tuple[str, ...] = (),
    ) -> None:
        self.codec = codec
        self.authors = authors
        self.stop_ids = stop_ids
        """Tokens that end a reply: the template's end of turn and the model's eos."""
        self.stop_strings = stop_strings
        """Texts that end a reply as a stop token does."""
        if not stop_ids:
            raise ValueError("stop_ids must hold at least one token, got none. Give the template's end of turn.")
        self._template = template
        self._template_code = authors.code(TEMPLATE)
        self._plans: dict[str, _Plan] = {}
        self._template_ids: dict[str, list[int]] = {}
        self._content_ids: dict[str, npt.NDArray[np.int32]] = {}
        self._content_chars = 0
        self._rewrites: dict[tuple[Event, Thinking, bool], bool] = {}

    def initial(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> TokenSequence:
        """The whole first prompt, with the generation prompt."""
        slots = Slots()
        rows, tool_rows = slots.messages(messages), slots.tools(tools)
        speakers = {
            index: message.author
            for index, message in enumerate(messages)
            if message.role == "assistant" and self.authors.author(message.author).action
        }

        def plan() -> _Plan:
            neutral = self._template.render_rows(rows, tools=tool_rows, generation_prompt=True)
            pieces = outline(neutral, slots.required)
            return self._plan_demonstrated(neutral, rows, tool_rows, speakers) if speakers else _Plan((), "", pieces)

        return self._render(repr((rows, tool_rows, speakers)), plan, slots, messages, tools)

    def increment(self, reply: Message, messages: Sequence[Message]) -> TokenSequence:
        """What follows the stop token of `reply`: the rest of its turn, `messages`, the generation prompt."""
        slots = Slots()
        rows = slots.messages(messages)
        calls = [(call.name, call.id) for call in reply.tool_calls]
        return self._render(
            repr((calls, rows)),
            lambda: self._plan_increment(reply, messages, rows, slots),
            slots,
            messages,
            (),
        )

    def reply(self, message: Message) -> list[int]:
        """The tokens of a reply as the template writes it, its stop token last: what a policy says to say this.

        For replies that nobody sampled here: a teacher's, a demonstrator's. Contents become no control token.
        """
        asked = Message("user", "x")
        slots = Slots()
        rows = slots.messages([asked, message])
        pieces = outline(self._template.render_rows(rows, generation_prompt=False), slots.required)
        real = self._template.render_rows([to_template(asked), to_template(message)], generation_prompt=False)
        texts = read_along(real, pieces, slots.texts, 0)
        prompt = self._template.render_rows([to_template(asked)], generation_prompt=True)
        if not real.startswith(prompt):
            raise RenderError(
                "chat template must begin a reply as it does when it asks for one, got one that does not. "
                "Use another template."
            )
        parts, skipped = [], len(prompt)
        for piece, text in zip(pieces, texts, strict=True):
            parts.append((text[skipped:], isinstance(piece, str)))
            skipped = max(0, skipped - len(text))
        ids = self.codec.encode_reply(parts)
        stops = self.stop_ids & self.codec.added_ids or self.stop_ids
        end = next((place for place, token in enumerate(ids) if token in stops), None)
        if end is None:
            raise RenderError("chat template must end a reply with a stop token, got one that does not.")
        return ids[: end + 1]

    def count(self, message: Message) -> int:
        """Tokens of a message's contents; what the template writes around them is not counted."""
        slots = Slots()
        slots.messages([message])
        return sum(len(self._encode_content(text)) for text in slots.texts)

    def rewrites(
        self, shown: Sequence[Message], messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> bool:
        """Does the template write some of `shown`, which ends in a reply, anew when `messages` follow?

        The whole conversation is rendered only for templates that are known to do so after such an event.
        """
        event: Event = "user" if any(message.role == "user" for message in messages) else "tool_results"
        thoughts = {_thinking(message) for message in shown if message.role == shown[-1].role}
        if not any(self._may_rewrite(event, thinking, bool(tools)) for thinking in thoughts):
            return False
        rows = [_marked_row(index, message) for index, message in enumerate([*shown, *messages])]
        return bool(changes(self._template, rows, reply=len(shown) - 1, tools=Slots().tools(tools)))

    def _may_rewrite(self, event: Event, thinking: Thinking, tools: bool) -> bool:
        case = (event, thinking, tools)
        if case not in self._rewrites:
            self._rewrites[case] = rewrites_history(self._template, event=event, thinking=thinking, tools=tools)
        return self._rewrites[case]

    def _plan_demonstrated(
        self, neutral: str, rows: list[Row], tools: Sequence[Mapping[str, Any]], speakers: Mapping[int, str]
    ) -> _Plan:
        """The outline of `neutral` with the turns of these messages cut out, each its author's."""
        pieces: list[Piece] = []
        demonstrated: dict[int, str] = {}
        at = 0
        for index, author in speakers.items():
            around = Around(
                *(
                    self._template.render_rows(rows[:count], tools=tools, generation_prompt=prompted)
                    for count, prompted in ((index, False), (index, True), (index + 1, False))
                )
            )
            start, end = turn_span(neutral, around, self.codec, self.stop_ids)
            pieces += cut_pieces(neutral[at:start])
            turn = cut_pieces(neutral[start:end])
            demonstrated |= {len(pieces) + i: author for i, piece in enumerate(turn) if isinstance(piece, str)}
            pieces += turn
            at = end
        return _Plan((), "", (*pieces, *cut_pieces(neutral[at:])), demonstrated)

    def _plan_increment(self, reply: Message, messages: Sequence[Message], rows: list[Row], slots: Slots) -> _Plan:
        problem: RenderError | None = None
        for opening in openings(reply, messages):
            try:
                neutral = self._template.render_rows([*opening, *rows], generation_prompt=True)
                return self._cut_behind_reply(opening, neutral, slots)
            except RenderError as error:
                if problem is None or "tool_calls" not in opening[-1]:  # the plain opening's says most
                    problem = error
        assert problem is not None
        raise problem

    def _cut_behind_reply(self, opening: list[Row], neutral: str, slots: Slots) -> _Plan:
        before, reply, behind = neutral.rpartition(REPLY)
        if not reply:
            raise RenderError("chat template must write replies, got one that does not. Use another template.")
        pieces = outline(behind, slots.required)
        first = str(pieces[0])
        end = self.codec.first_of(self.stop_ids, first)
        if end is None and "tool_calls" in opening[-1]:  # what closes the made-up call was sampled in the real one
            raise RenderError(
                "chat template must end a turn of tool calls with one of the stop tokens, got one that does not. "
                "Add its end of turn to the stop tokens."
            )
        cut = 0 if end is None else end[1]
        return _Plan(tuple(opening), before + reply + first[:cut], (first[cut:], *pieces[1:]))

    def _render(
        self,
        shape: str,
        make_plan: Callable[[], _Plan],
        slots: Slots,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
    ) -> TokenSequence:
        real_rows = [to_template(message) for message in messages]
        plan = self._plans.get(shape)
        if plan is not None:
            try:
                return self._encode(plan, self._read(plan, real_rows, tools, slots), slots)
            except RenderError:
                del self._plans[shape]  # templates may write the date: outlines can grow old
        plan = make_plan()
        texts = self._read(plan, real_rows, tools, slots)
        _remember(self._plans, shape, plan)
        return self._encode(plan, texts, slots)

    def _read(self, plan: _Plan, rows: list[Row], tools: Sequence[Mapping[str, Any]], slots: Slots) -> list[str]:
        real = self._template.render_rows([*plan.opening, *rows], tools=tools, generation_prompt=True)
        if not real.startswith(plan.skipped):
            raise RenderError(
                "chat template must write the same text before a reply whatever follows it, "
                "got one that does not. Use another template."
            )
        return read_along(real, plan.pieces, slots.texts, len(plan.skipped))

    def _encode(self, plan: _Plan, texts: list[str], slots: Slots) -> TokenSequence:
        ids: list[npt.NDArray[np.int32]] = []
        codes: list[int] = []
        for place, (piece, text) in enumerate(zip(plan.pieces, texts, strict=True)):
            if isinstance(piece, str):
                ids.append(np.array(self._encode_template(text), np.int32))
                codes.append(
                    self.authors.code(plan.demonstrated[place]) if place in plan.demonstrated else self._template_code
                )
            else:
                ids.append(self._encode_content(text))
                codes.append(self.authors.code(slots.authors[piece]))
        n = sum(map(len, ids))
        return TokenSequence(
            np.concatenate(ids),
            np.repeat(np.array(codes, np.uint8), [len(piece_ids) for piece_ids in ids]),
            np.full(n, np.nan, np.float32),
            np.full(n, NOT_SAMPLED, np.int32),
        )

    def _encode_content(self, text: str) -> npt.NDArray[np.int32]:
        ids = self._content_ids.pop(text, None)
        if ids is None:
            ids = np.array(self.codec.encode_text(text), np.int32)
            self._content_chars += len(text)
            while self._content_ids and self._content_chars > _MAX_CACHED_CHARS:
                oldest = next(iter(self._content_ids))
                del self._content_ids[oldest]
                self._content_chars -= len(oldest)
        self._content_ids[text] = ids  # at the end: the one used longest ago goes first
        return ids

    def _encode_template(self, text: str) -> list[int]:
        ids = self._template_ids.get(text)
        if ids is None:
            ids = self.codec.encode_template(text)
            _remember(self._template_ids, text, ids)
        return ids


def _marked_row(index: int, message: Message) -> Row:
    """A message as `changes` wants it: contents that it recognises in any rendering."""
    row = to_template(message)
    if message.content.strip() or not message.tool_calls:
        row["content"] = mark(index)
    if message.reasoning is not None:
        row["reasoning_content"] = "" if _thinking(message) == "empty" else mark(index, "thinking")
    for call in row.get("tool_calls", ()):
        call["function"]["arguments"] = {"reply": mark(index)}
    return row


def _thinking(message: Message) -> Thinking:
    if message.reasoning is None:
        return "none"
    return "some" if message.reasoning.strip() else "empty"


def _remember(cache: dict[str, _Value], key: str, value: _Value) -> None:
    if len(cache) >= _MAX_CACHED:
        cache.clear()
    cache[key] = value
