"""A training sequence in a terminal: tokens coloured by author, trained ones underlined, log-probs beside."""

from __future__ import annotations

from itertools import groupby

from rich.text import Text

from context.authors import DISCARD_SUFFIX, AuthorTable
from context.tokens.token_sequence import Decoder, TokenSequence, loss_mask, pieces, response_mask
from context.wording import visible, visible_lines

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
        ids = tokens.token_ids[at].tolist()
        alone = ((place, place + 1, f"{token} ") for place, token in enumerate(ids))
        for first, last, text in alone if decoder is None else pieces(ids, decoder):
            view.append(text if decoder is None else visible_lines(text).replace("\n", "↵\n"), style=style)
            if log_probs and sampled[at[0]]:
                values = tokens.behavior_log_probs[at][first:last]
                view.append("[" + " ".join(f"{value:.2f}" for value in values) + "]", style="dim")
        view.append("\n")
    return view
