"""A training sequence in a terminal: tokens coloured by author, trained ones underlined, log-probs beside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.text import Text

from context.authors import DISCARD_SUFFIX, AuthorTable
from context.tokens.token_sequence import Decoder, TokenSequence, loss_mask, pieces, response_mask
from context.wording import visible

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
        view.append(visible(name), style=f"bold {colour}")
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
    """Tokens first..last-1 with their text, which is the id without a decoder."""
    begin = at[0]
    ids = tokens.token_ids[begin : at[-1] + 1].tolist()
    if decoder is None:
        yield from ((begin + t, begin + t + 1, f"{token} ") for t, token in enumerate(ids))
    else:
        for first, last, text in pieces(ids, decoder):
            yield begin + first, begin + last, _visible(text)


def _visible(text: str) -> str:
    return "↵\n".join(map(visible, text.split("\n")))
