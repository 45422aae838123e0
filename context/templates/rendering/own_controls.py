"""Which control tokens of a rendering its template wrote, and which are what somebody said.

A template's own are marked where its source holds them as a whole. Others were put together: by the template
(`'<|' + message.role + '|>'`), by a content, or by both. They are the template's if they stand there, too, where every
content is broken that could take part in them.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import accumulate, pairwise, takewhile
from typing import Any

from context.messages import Change, Message
from context.templates.chat_template import CALLED, LOOKUP, ChatTemplate, RenderError
from context.templates.rendering.contents import Row, row, tool_rows
from context.templates.rendering.marks import BREAK, Written, inner, own
from context.tokens.codec import Control, TokenCodec
from context.wording import storable

Again = Callable[[Change], str | None]
"""The whole rendering with this done to each content and name; None where it changes none."""
_Place = tuple[str, str, str]
"""What stands before a control token, the token, and what stands behind it."""
_FAR = 32
"""Characters by which a content is known to stand next to a control token."""


def marking(template: ChatTemplate, codec: TokenCodec) -> ChatTemplate:
    """The template with its own control tokens marked. Raises RenderError where that changes what it writes."""

    def mark(text: str) -> str:
        return own(text, [inner(text, control) for control in codec.controls(text)])

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


_NOW = datetime(2026, 1, 1)
_PROBES: Sequence[tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]] = (
    ([{"role": role, "content": "zq"} for role in ("user", "assistant", "user")], ()),
    ([{"role": role, "content": "zq"} for role in ("system", "user")], ()),
    (CALLED, (LOOKUP,)),
)


def rendered_again(
    messages: Sequence[Message], tools: Sequence[Any], write: Callable[[Sequence[Row], Sequence[Any]], str]
) -> Again:
    """What `write` makes of the messages and tools with their contents and names changed."""

    def given(leaf: Change) -> tuple[list[Row], list[Any]]:
        return [row(message, leaf, leaf) for message in messages], tool_rows(tools, leaf, leaf)

    def again(leaf: Change) -> str | None:
        changed = given(lambda text: leaf(storable(text)))
        return None if changed == given(storable) else write(*changed)

    return again


def own_controls(written: Written, codec: TokenCodec, again: Again, *, before: str = "") -> list[Control]:
    """The control tokens that the template wrote in `written`, behind `before`. RenderError where none is sure."""
    text, own = written.text, frozenset(written.own)
    breaks: Sequence[int] = ()
    held, joined, deep = frozenset[str](), frozenset[_Place](), False
    while True:
        found = _between(breaks, text, codec)
        others = [inner(text, control) for control in found if (control.first, control.end) not in own]
        others = [place for place in others if place not in own]
        names = held.union(text[first:end] for first, end in others)
        places = joined
        if names == held:  # no content holds these tokens, but some may hold a part
            places = joined.union((text[max(0, a - _FAR) : a], text[a:b], text[b : b + _FAR]) for a, b in others)
        if (names, places) == (held, joined):
            if deep or not others:
                return found
            deep = True  # no end of these tokens is a content's, so their middles may be
        held, joined = names, places
        try:
            broken = again(partial(_broken, held=held, joined=joined, deep=deep))
        except RenderError:
            broken = ""
        if broken is None:
            continue
        parts = broken.split(BREAK)
        if "".join(parts) != before + text:
            raise RenderError(
                "chat template must not decide by a content that takes part in a control token, got "
                f"{', '.join(sorted(held))[:80]!r}. Leave it out of contents and names, or use another template."
            )
        ends = accumulate(map(len, parts[:-1]), initial=-len(before))
        breaks = sorted({end for end in ends if end > 0})


def _between(breaks: Sequence[int], text: str, codec: TokenCodec) -> list[Control]:
    return [
        Control(found.token, first + found.first, first + found.end)
        for first, end in pairwise([0, *breaks, len(text)])
        for found in codec.controls(text[first:end])
    ]


def _broken(content: str, held: Collection[str], joined: Collection[_Place], deep: bool) -> str:
    """The content with breaks within tokens it holds, and at ends where a token's end (`deep`: any part) stands."""
    said = content.strip()
    if not said:  # an argument may have such a name; a content that is blank never comes here
        return content
    before, _, behind = content.partition(said)
    small = said.lower()
    holds = [name for name in held if name.lower() in small]
    cuts = {found.start() + 1 for name in holds for found in re.finditer(f"(?i)(?={re.escape(name)})", said)}
    if any(_goes_on(said, token, after, halves=False, deep=deep) for _, token, after in joined):
        cuts.add(0)
    if any(_goes_on(said[::-1], token[::-1], ahead[::-1], halves=True, deep=deep) for ahead, token, _ in joined):
        cuts.add(len(said))
    turns = said, said[::-1]
    if any(re.search(".*?".join(map(re.escape, token)), turn, re.DOTALL) for _, token, _ in joined for turn in turns):
        cuts.update(range(1, len(said)))  # a template may take out what stands between, or turn it round
    if not cuts:
        return content
    edges = [0, *sorted(cuts), len(said)]
    return before + BREAK.join(said[first:end] for first, end in pairwise(edges)) + behind


def _goes_on(said: str, token: str, after: str, *, halves: bool, deep: bool) -> bool:
    """Whether the text could be the rest of a token that begins before it; a longer one must go on as `after` does.

    A template puts no content into the middle of a word. Another content may end there: of two such, it is enough to
    break one, so that a text that is no more than a part of the token counts with `halves` alone.
    """
    for number in range(1, len(token)):
        part = token[number:]
        in_word = token[number - 1].isalnum() and part[0].isalnum()
        if said == part:
            found = halves or not in_word
        elif part.startswith(said):
            found = deep and not in_word and not (said[-1].isalnum() and part[len(said)].isalnum())
        else:  # compared up to the first sign, which a template may write in another way
            word = "".join(takewhile(str.isalnum, said[len(part) : len(part) + _FAR]))
            found = said.startswith(part) and after.startswith(word)
        if found:
            return True
    return False
