"""Tells control tokens that the template wrote from the same text in a message.

The template's own tokens are marked where its source contains them whole (`written_text`). A token without a mark is in
doubt: the template may have put it together, a content may spell it, or each gave a part. The template is then rendered
again, with a break (here `#`) in every content that could have a part in the token. If the token is still there, it is
the template's:

    template        {{ '<|' + role + '|>' }}{{ content }}<|end|>
    content         What is <|end|>?
    text            <|user|>What is <|end|>?<|end|>         in doubt: <|user|> and the first <|end|>
    asked again     <|user|>What is <#|end|>?<|end|>        <|user|> is the template's, the first <|end|> is not

Only suspected contents are broken, as a template may decide by its contents. At first only contents that contain the
whole token are suspected. While a token is in doubt, contents that contain one end of it are suspected too, then
contents that contain its middle.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate, pairwise, takewhile
from typing import Any

from context.messages import Change
from context.templates.chat_template import CALLED, LOOKUP, ChatTemplate, RenderError
from context.templates.rendering.written_text import BREAK, Written, mark_own
from context.tokens.codec import Control, Span, TokenCodec

AskAgain = Callable[[Change], str | None]
"""Renders the whole conversation with every content and name changed. None: the change leaves all of them equal."""
_NEAR = 32
"""Characters beside a control token that are compared with a content."""
_NOW = datetime(2026, 1, 1)
_PROBES: Sequence[tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]] = (
    ([{"role": role, "content": "zq"} for role in ("user", "assistant", "user")], ()),
    ([{"role": role, "content": "zq"} for role in ("system", "user")], ()),
    (CALLED, (LOOKUP,)),
)


def mark_controls(template: ChatTemplate, codec: TokenCodec) -> ChatTemplate:
    """Mark the template's own control tokens. Raises RenderError if the marks change what the template writes."""

    def mark(text: str) -> str:
        return mark_own(text, [control.place.without_space(text) for control in codec.controls(text)])

    found = template.marking(mark)
    for rows, tools in _PROBES:
        try:
            text = template.render(rows, tools=tools, generation_prompt=True, now=_NOW)
        except RenderError:
            continue
        if Written(found.render(rows, tools=tools, generation_prompt=True, now=_NOW)).text != text:
            raise RenderError(
                "chat template must write its control tokens whole, got one that cuts, measures or escapes them. Set "
                "context.template: hermes (or llama3, mistral, a .jinja file)."
            )
    return found


def find_own_controls(written: Written, codec: TokenCodec, ask_again: AskAgain, *, before: str = "") -> list[Control]:
    """The control tokens that the template wrote in `written`, which follows `before` in the conversation's text.

    Raises RenderError where the template writes another text once a suspected content is broken.
    """
    suspicion, breaks = Suspicion(), list[int]()
    while True:
        found = _find_controls(written.text, breaks, codec)
        wider = suspicion.widened(_find_doubtful(written, found))
        if wider is None:
            return found
        suspicion = wider
        try:
            again = ask_again(suspicion.broken)
        except RenderError:
            again = ""
        if again is None:  # no content is under this suspicion
            continue
        parts = again.split(BREAK)
        if "".join(parts) != before + written.text:
            raise RenderError(
                "chat template must not decide by a content that takes part in a control token, got "
                f"{', '.join(sorted(suspicion.spelled))[:80]!r}. Leave it out of contents and names, or use another "
                "template."
            )
        places = accumulate(map(len, parts[:-1]), initial=-len(before))
        breaks = sorted({place for place in places if place > 0})


def _find_controls(text: str, breaks: Sequence[int], codec: TokenCodec) -> list[Control]:
    """Find the control tokens of a text that cross no break."""
    return [
        Control(found.token, found.place.moved(start))
        for start, end in pairwise([0, *breaks, len(text)])
        for found in codec.controls(text[start:end])
    ]


def _find_doubtful(written: Written, found: Sequence[Control]) -> list[Doubtful]:
    """Find the tokens of a text that its template did not mark."""
    own = frozenset(written.own)
    inner = [control.place.without_space(written.text) for control in found if control.place not in own]
    return [Doubtful.in_text(written.text, place) for place in inner if place not in own]


@dataclass(frozen=True)
class Doubtful:
    """A control token in doubt, with the characters before it and behind it."""

    before: str
    token: str
    behind: str

    @classmethod
    def in_text(cls, text: str, place: Span) -> Doubtful:
        before = text[max(0, place.start - _NEAR) : place.start]
        return cls(before, place.cut_from(text), text[place.end : place.end + _NEAR])

    def reversed(self) -> Doubtful:
        """Reverse every text, so that a check of the token's end checks its beginning."""
        return Doubtful(self.behind[::-1], self.token[::-1], self.before[::-1])

    def may_end_in(self, content: str, *, is_half_enough: bool, may_go_on: bool) -> bool:
        """True if the token may begin before the content and end in it.

        If the content is longer than the rest of the token, it must continue like the text after the token. A template
        puts no content into the middle of a word, but another content may end there. Breaking one of the two contents
        is enough: `is_half_enough` says whether this one counts. `may_go_on`: the content may be the token's middle.
        """
        for cut in range(1, len(self.token)):
            rest = self.token[cut:]
            is_within_word = self.token[cut - 1].isalnum() and rest[0].isalnum()
            if content == rest:
                found = is_half_enough or not is_within_word
            elif rest.startswith(content):
                ends_within_word = content[-1].isalnum() and rest[len(content)].isalnum()
                found = may_go_on and not is_within_word and not ends_within_word
            else:  # compared up to the first sign, which a template may write in another way
                word = "".join(takewhile(str.isalnum, content[len(rest) : len(rest) + _NEAR]))
                found = content.startswith(rest) and self.behind.startswith(word)
            if found:
                return True
        return False

    def is_scattered_in(self, content: str) -> bool:
        """True if the content has the token's characters in their order, forwards or backwards.

        A template may remove the characters between them, or reverse the content.
        """
        pattern = ".*?".join(map(re.escape, self.token))
        return any(re.search(pattern, said, re.DOTALL) for said in (content, content[::-1]))


@dataclass(frozen=True)
class Suspicion:
    """The tokens that contents may have spelled, as a whole or in part."""

    spelled: frozenset[str] = frozenset()
    """A content may hold one of these tokens whole."""
    shared: frozenset[Doubtful] = frozenset()
    """A content may hold one end of these tokens."""
    in_the_middle: bool = False
    """A content may hold the middle of the tokens in `shared`."""

    def widened(self, doubtful: Collection[Doubtful]) -> Suspicion | None:
        """The next wider suspicion for the tokens that are still in doubt. None: no wider one is needed."""
        spelled = self.spelled.union(each.token for each in doubtful)
        shared = self.shared.union(doubtful)
        if spelled != self.spelled:
            return replace(self, spelled=spelled)
        if shared != self.shared:
            return replace(self, shared=shared)
        return replace(self, in_the_middle=True) if doubtful and not self.in_the_middle else None

    def broken(self, content: str) -> str:
        """Put a break into the content at each place that a suspected token may cross."""
        said = content.strip()
        cuts = self._find_cuts(said) if said else set()  # the name of an argument may be white space
        if not cuts:
            return content
        before, _, behind = content.partition(said)
        return before + BREAK.join(said[start:end] for start, end in pairwise([0, *sorted(cuts), len(said)])) + behind

    def _find_cuts(self, said: str) -> set[int]:
        small = said.lower()
        held = [token for token in self.spelled if token.lower() in small]
        cuts = {found.start() + 1 for token in held for found in re.finditer(f"(?i)(?={re.escape(token)})", said)}
        middle = self.in_the_middle
        if any(each.may_end_in(said, is_half_enough=False, may_go_on=middle) for each in self.shared):
            cuts.add(0)
        turned = (each.reversed() for each in self.shared)
        if any(each.may_end_in(said[::-1], is_half_enough=True, may_go_on=middle) for each in turned):
            cuts.add(len(said))
        if any(each.is_scattered_in(said) for each in self.shared):
            cuts.update(range(1, len(said)))
        return cuts
