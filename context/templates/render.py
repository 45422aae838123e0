"""Messages -> exact tokens with their authors. The only place where a chat template is applied to a conversation.

    messages     system: Be brief.  user: Which code?
    text         <|system|>Be brief.<|end|><|user|>Which code?<|end|><|assistant|>
    tokens       the tokenizer's own for this text; a content that spells <|end|> becomes plain text
    authors      the contents' tokens are their message's author's, all others the template's

The parts: `rendering/conversation_writer` has the template write the text, `own_controls` tells its control tokens from
words that spell one, `token_writer` makes the tokens, `reply_end` finds what follows a reply that was sampled, and
`demonstrated_replies` writes the replies that nobody sampled.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from context.authors import AuthorTable
from context.messages import Message
from context.parse import ReplyParser
from context.parse.choose import reply_parser
from context.parse.reply import before_stop
from context.templates.chat_template import ChatTemplate, RenderError
from context.templates.hidden_parts import HIDDEN_THOUGHTS, hidden_calls, unlike
from context.templates.rendering.contents import with_thought
from context.templates.rendering.conversation_writer import ConversationWriter, Rendering, passages_of
from context.templates.rendering.demonstrated_replies import DemonstratedReplies
from context.templates.rendering.reply_end import Sampled, ShownReply, Tail, find_reply_end
from context.templates.rendering.token_writer import Passage, TokenWriter
from context.tokens.codec import TokenCodec
from context.tokens.token_sequence import TokenSequence

_Tools = Sequence[Mapping[str, Any]]


class Renderer:
    """Turns messages into tokens so that no content can become a control token.

    An action author's assistant message is a reply in the policy's place: all of its turn is its author's. What the
    policy sampled is never rendered: behind a reply, only what the template writes after its stop token is added.
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
        """`allow_hidden`: the template may leave out calls, results and parts of replies.

        Raises RenderError for a template that writes a control token in pieces.
        """
        self.codec = codec
        self.authors = authors
        self.stop_ids = stop_ids
        """Tokens that end a reply: the template's end of turn and the model's eos."""
        self.end_ids = stop_ids & codec.added_ids or stop_ids
        """The stop tokens that end a written reply: a model may name a plain token as its eos."""
        self.stop_strings = stop_strings
        """Texts that end a reply, for models without an end of turn of their own."""
        self.template = template
        self._stops = {token: codec.decode([token]) for token in self.end_ids}
        self._allow_hidden = allow_hidden
        self._conversations = ConversationWriter(template, codec, allow_hidden=allow_hidden)
        self._tokens = TokenWriter(codec, authors)
        self._demonstrated = DemonstratedReplies(self._conversations, self._tokens, self.end_ids)

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
    ) -> Rendering:
        """The text of a prompt. `after`: an earlier prompt of the conversation; `now`: the day, where there is none."""
        return self._conversations.render(messages, tools, after=after, now=now)

    def tokens(self, rendering: Rendering) -> TokenSequence:
        """All tokens of a prompt."""
        has_calls = any(message.tool_calls for message in rendering.messages)
        if has_calls and self._hidden_calls and not self._allow_hidden:
            raise RenderError(self._hidden_calls)  # a call may hold numbers alone, which are not looked for
        placed = self._conversations.find_contents(rendering)
        controls = self._conversations.find_controls(rendering)
        turns = [
            Passage(self._demonstrated.find_turn(rendering, number, placed, controls), message.author)
            for number, message in enumerate(rendering.messages)
            if message.role == "assistant" and self.authors.author(message.author).action
        ]
        return self._tokens.write(rendering.written.text, controls, [*turns, *passages_of(placed)])

    def increment(self, before: Rendering, grown: Rendering, sampled: Sampled) -> TokenSequence | None:
        """The tokens after the reply to the prompt `before`: the rest of its turn, later messages, the next prompt.

        `grown` is the later prompt with the reply and these messages. None: the template has changed the earlier text
        or the reply.
        """
        rest = grown.written.after(before.written)
        if rest is None:
            return None
        reply, length = len(before.messages), len(before.written.text)
        tail = Tail(rest.text, self._conversations.find_controls(grown, rest), self._stops)
        stop = tail.find_stop_of(sampled)
        as_sampled = stop is not None
        start = length if stop is None else length + stop.place.end  # no content of others stands in the reply
        placed = self._conversations.find_contents(grown, reply + as_sampled, start, required=reply + 1)
        following = passages_of([each for each in placed if each.message > reply])
        passages = [passage.moved(-length) for passage in following]
        said = [each for each in placed if each.message == reply]
        shown = ShownReply(
            grown.messages[reply],
            end=max((each.place.end - length for each in said if each.place is not None), default=0),
            following=min((each.place.start for each in passages), default=len(rest.text)),
            missing=tuple(each.content.text for each in said if each.place is None),
            as_sampled=as_sampled,
        )
        end = find_reply_end(tail, shown, sampled, self._conversations.write_as_last(before, grown))
        if end is None:
            return None
        return self._tokens.write(rest.text, tail.controls, passages, start=end.place, lead=end.closing, opens=False)

    def said(self, token_ids: Sequence[int], stop: Sequence[str] = ()) -> tuple[Sampled, bool]:
        """A sampled reply as text, without what ended it, and whether something did.

        `stop`: further texts that end a reply. One that stands before the last token has not ended it.
        """
        if token_ids[-1] in self.stop_ids:
            return Sampled(self.codec.decode(token_ids[:-1], opens=True), token_ids[-1]), True
        text = self.codec.decode(token_ids, opens=True)
        is_further = stop and before_stop(self.codec.decode(token_ids[:-1], opens=True), stop) is None
        before = before_stop(text, (*self.stop_strings, *(stop if is_further else ())))
        return Sampled(text if before is None else before, None), before is not None

    def reply(self, prompt: Rendering, message: Message, parser: ReplyParser | None = None) -> list[int]:
        """The tokens of a reply that the policy did not sample, such as a demonstrated one, with its stop token last.

        The template writes the message, and no content becomes a control token. The `parser` (by default the template's
        own) reads the tokens back. Raises RenderError if it reads another message, unless the template may leave out
        what is missing.
        """
        ids = self._demonstrated.write(prompt, message)
        self._read_back(prompt, message, ids, parser)
        return ids

    def count(self, message: Message) -> int:
        """The number of tokens in a message's contents, without what the template writes around them."""
        return self._tokens.count(message)

    def _read_back(self, prompt: Rendering, message: Message, ids: Sequence[int], parser: ReplyParser | None) -> None:
        needs_calls = bool(message.tool_calls) and not self._allow_hidden
        reader = parser or reply_parser(self.template, prompt.tools, calls=needs_calls)
        read = reader.parse(prompt.opened_thought + self.said(ids)[0].text, stopped=True)
        is_spelled = with_thought(message) is not message and bool(self.codec.controls("</think>"))
        if is_spelled and self.codec.token_id("</think>") not in ids:
            problem: str | None = HIDDEN_THOUGHTS  # the marks of the thought are plain text
        else:
            problem = unlike(with_thought(message), read, opened=prompt.opened_thought)
        if problem is not None and (read.outcome == "malformed" or not self._allow_hidden):
            raise RenderError(problem)

    @cached_property
    def _hidden_calls(self) -> str | None:
        return hidden_calls(self.template)
