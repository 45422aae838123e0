"""A training sequence in a terminal: tokens coloured by author, trained ones underlined, log-probs beside."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Protocol

from rich.text import Text

from context.authors import DISCARD_SUFFIX, AuthorTable
from context.masks import loss_mask, response_mask
from context.tokens import TokenSequence

_COLOURS = {
    "initialization": "magenta",
    "user": "blue",
    "env": "yellow",
    "memory": "cyan",
    "llm": "green",
    "llm(do_not_train)": "bright_green",
    "demonstration": "bright_blue",
    "history": "bright_cyan",
    "template": "bright_black",
}
_OTHER_COLOUR = "white"
_TRAINED = "bold underline"
_MAX_TOKENS_PER_CHARACTER = 6


class Decoder(Protocol):
    """What turns ids into text: a `TokenCodec`."""

    def decode(self, ids: Sequence[int]) -> str: ...


def token_view(
    tokens: TokenSequence, authors: AuthorTable, decoder: Decoder | None, *, log_probs: bool = False
) -> Text:
    """One paragraph per stretch of one author: its name, what its masks say, and its tokens.

    Trained tokens are underlined; with `log_probs`, sampled tokens are followed by their log-probs (nats).
    Control and bidirectional characters are written out, so that a text can't act on the terminal. Without a
    decoder, ids are shown.
    """
    action, trained = response_mask(tokens, authors), loss_mask(tokens, authors)
    sampled = authors.has_behavior(tokens.authors)
    view = Text()
    for code, stretch in groupby(range(len(tokens)), key=lambda t: int(tokens.authors[t])):
        at = list(stretch)
        name = authors.name(code)
        colour = _COLOURS.get(name.removesuffix(DISCARD_SUFFIX), _OTHER_COLOUR)
        not_trained = "sampled, not trained" if sampled[at[0]] else "not trained" if action[at[0]] else "not sampled"
        state = "trained" if trained[at[0]] else not_trained
        view.append(f"{name}", style=f"bold {colour}")
        view.append(f" · {len(at)} tokens · {state}\n", style="dim")
        style = f"{colour} {_TRAINED}" if trained[at[0]] else colour
        for first, last, text in _pieces(tokens, at, decoder):
            view.append(text, style=style)
            if log_probs and sampled[at[0]]:
                values = tokens.behavior_log_probs[first:last]
                view.append("[" + " ".join(f"{value:.2f}" for value in values) + "]", style="dim")
        view.append("\n")
    return view


def _pieces(tokens: TokenSequence, at: Sequence[int], decoder: Decoder | None) -> Iterator[tuple[int, int, str]]:
    """Tokens first..last-1 with their text: one token each, or the few that together spell one character."""
    ids = tokens.token_ids.tolist()
    first, end = at[0], at[-1] + 1
    while first < end:
        last = first + 1
        if decoder is None:
            yield first, last, f"{ids[first]} "
        else:
            longest = min(end, first + _MAX_TOKENS_PER_CHARACTER)
            text = decoder.decode(ids[first:last])
            while text.endswith("\ufffd") and last < longest:
                last += 1
                text = decoder.decode(ids[first:last])
            if text.endswith("\ufffd"):
                last, text = first + 1, decoder.decode(ids[first : first + 1])
            yield first, last, "".join(map(_visible, text))
        first = last


def _visible(character: str) -> str:
    if character == "\n":
        return "↵\n"
    # Cc: terminal control; Cf: invisible, bidirectional; Cs: half characters; Co: private use; Z: lines.
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp"):
        return f"<U+{ord(character):04X}>"
    return character
