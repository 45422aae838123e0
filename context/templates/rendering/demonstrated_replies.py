"""Finds the tokens of replies that nobody sampled: of a teacher, a demonstrator, or a person in the policy's place.

The tokens are those that a policy would sample if it wrote like the template: those behind the generation prompt, up
to the stop token.

    prompt          <|user|>Which code?<|end|><|assistant|>
    with the reply  <|user|>Which code?<|end|><|assistant|>It is 78.<|end|>
    the reply                                              It is 78.<|end|>

In some templates prompt and reply do not meet so plainly. A prompt may end in an empty thought that is not written
before replies: the reply then begins with the control token at which the two texts differ. The header of the next turn
may end a turn: the reply then ends with that header's token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from context.messages import Message
from context.templates.chat_template import RenderError
from context.templates.rendering.contents import PlacedContent
from context.templates.rendering.conversation_writer import ConversationWriter, Rendering
from context.templates.rendering.token_writer import TokenWriter
from context.tokens.codec import Control, Span
from context.wording import shared_opening

_FOLLOWING = "q7following7q"


@dataclass(frozen=True)
class _SamePlace:
    """A place of a prompt, and the place of a longer text that has the same words before it."""

    in_prompt: int = 0
    in_text: int = 0

    def moved_to_text(self, place: int) -> int:
        """The place of the text for a later place of the prompt."""
        return place + self.in_text - self.in_prompt


class DemonstratedReplies:
    """Finds the tokens of replies that nobody sampled."""

    def __init__(self, conversations: ConversationWriter, tokens: TokenWriter, end_ids: frozenset[int]) -> None:
        self._conversations = conversations
        self._tokens = tokens
        self._end_ids = end_ids

    def write(self, prompt: Rendering, message: Message) -> list[int]:
        """Find the tokens by which the template writes this message after the prompt, its stop token last."""
        whole = self._conversations.render((*prompt.given, message), prompt.tools, after=prompt, prompted=False)
        controls = self._conversations.find_controls(whole)
        text = whole.written.text
        start = self._find_start(prompt, text)
        ids = self._encode_behind(text, start, controls)
        end = next((place for place, token in enumerate(ids) if token in self._end_ids), None)
        if end is not None:
            return ids[: end + 1]
        text = text[: max(start, len(text.rstrip()))]
        controls = [each for each in controls if each.place.end <= len(text)]
        return [*self._encode_behind(text, start, controls), self._find_next_header(whole)]

    def find_turn(
        self, rendering: Rendering, number: int, placed: Sequence[PlacedContent], controls: Sequence[Control]
    ) -> Span:
        """Find the turn of the message with this number: from the end of its prompt to its stop token.

        If the template writes no stop token after the turn, it ends with its last content.
        """
        text = rendering.written.text
        prompt = self._conversations.render(rendering.given[:number], rendering.tools, now=rendering.now)
        if not prompt.written.text:  # no token before the turn could predict its first one
            raise RenderError(
                "chat template must write something before an action author's message, got nothing. Begin with "
                "another one."
            )
        # A template may write in another way what stands before the last content, once more is said.
        pairs = zip(self._conversations.find_contents(prompt), placed, strict=False)
        ends = [(was.place.end, now.place.end) for was, now in pairs if was.place is not None and now.place is not None]
        start = self._find_start(prompt, text, _SamePlace(*max(ends, default=(0, 0))))
        shown = [(each.message, each.place) for each in placed if each.place is not None]
        said = max((place.end for message, place in shown if message == number), default=start)
        following = min((place.start for message, place in shown if message > number), default=len(text))
        stops = (each.place for each in controls if each.token in self._end_ids)
        end = next((stop.end for stop in stops if start <= stop.start and stop.end <= following), said)
        if end < said:
            raise RenderError(
                "chat template must write an action author's message in one turn, got one that closes it before "
                f"{text[end:said][-40:]!r}. Use author 'initialization', or another template."
            )
        return Span(start, end)

    def _find_start(self, prompt: Rendering, text: str, same: _SamePlace | None = None) -> int:
        """Find the character of `text` at which the policy's own part of the reply to the prompt begins.

        Prompt and text are compared from the place `same` on. Raises RenderError if the reply does not continue its
        prompt.
        """
        same = same or _SamePlace()
        asked, rest = prompt.written.text, text[same.in_text :]
        if rest.startswith(asked[same.in_prompt :]):
            return same.moved_to_text(len(asked))
        parted = same.in_prompt + len(shared_opening(asked[same.in_prompt :], rest))
        places = [each.place for each in self._conversations.find_controls(prompt)]
        if not asked[parted:].strip() and any(place.end == parted for place in places):  # space behind a thought's mark
            return same.moved_to_text(parted)
        unprompted = len(self._conversations.write_unprompted(prompt))
        contents = self._conversations.find_contents(prompt)
        said = max((each.place.end for each in contents if each.place is not None), default=0)
        differing = next((place for place in places if said <= place.start <= parted < place.end), None)
        if differing is None or differing.start <= unprompted < len(asked):
            raise RenderError(
                "chat template must begin a reply as it does when it asks for one, got a prompt that ends in "
                f"{asked[parted:][-60:]!r} where the reply has {text[same.moved_to_text(parted) :][:60]!r}. Set "
                "context.template_args (enable_thinking), context.template: hermes, or another template."
            )
        return same.moved_to_text(differing.start)

    def _encode_behind(self, text: str, start: int, controls: Sequence[Control]) -> list[int]:
        """Encode the text from `start` on, as it follows the text before."""
        lead = next((each for each in reversed(controls) if each.place.end <= start), None)
        asked, ids = (self._encode_from(lead, text[:end], controls) for end in (start, len(text)))
        if ids[: len(asked)] == asked:
            return ids[len(asked) :]
        # The first token would begin in the prompt, where a policy can't sample.
        behind = [
            Control(each.token, Span(max(each.place.start, start), each.place.end).moved(-start))
            for each in controls
            if each.place.end > start
        ]
        found: list[int] = self._tokens.write(text[start:], behind, opens=False).token_ids.tolist()
        return found

    def _encode_from(self, lead: Control | None, text: str, controls: Sequence[Control]) -> list[int]:
        """The tokens of the text behind `lead`; behind its beginning where there is none."""
        within = [each for each in controls if each.place.end <= len(text)]
        start = 0 if lead is None else lead.place.end
        found: list[int] = self._tokens.write(text, within, start=start, lead=lead).token_ids.tolist()
        return found

    def _find_next_header(self, whole: Rendering) -> int:
        """The token that opens the turn after a reply, if this token ends the reply."""
        calls = whole.given[-1].tool_calls
        following = Message("user", _FOLLOWING)
        if calls:
            following = Message("tool", _FOLLOWING, "env", name=calls[0].name, tool_call_id=calls[0].id)
        controls: list[Control] = []
        try:
            grown = self._conversations.render((*whole.given, following), whole.tools, after=whole, prompted=False)
        except RenderError:
            pass
        else:
            place = grown.written.text.rfind(_FOLLOWING)
            found = self._conversations.find_controls(grown)
            controls = [each for each in found if each.place.end <= place and each.token in self._end_ids]
        if not controls:
            raise RenderError("chat template must end a reply with a stop token, got one that does not.")
        return controls[-1].token
