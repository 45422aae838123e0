"""Prints a training sequence in a terminal: tokens are coloured by author, trained ones underlined."""

from itertools import groupby

from rich.text import Text

from context.authors import DISCARD_SUFFIX, AuthorTable
from context.tokens.loss_mask import loss_mask, response_mask
from context.tokens.token_sequence import Decoder, TokenSequence, pieces
from context.wording import visible, visible_lines

_COLOURS = ("magenta", "blue", "yellow", "cyan", "green", "bright_green", "bright_black", "bright_blue", "bright_cyan")
"""Colours by the code of the author: initialization, user, env, memory, llm, ..."""


def token_view(tokens: TokenSequence, authors: AuthorTable, decoder: Decoder | None) -> Text:
    """Write one paragraph per run of tokens of one author: the author's name, the masks, and the tokens.

    Trained tokens are underlined, and sampled ones are followed by their log-probs in nats. Control characters are
    written out. Without a decoder, token ids are shown.
    """
    action, trained = response_mask(tokens, authors), loss_mask(tokens, authors)
    sampled = authors.has_behavior(tokens.authors)
    view = Text()
    for code, stretch in groupby(range(len(tokens)), key=lambda t: int(tokens.authors[t])):
        at = list(stretch)
        name = authors.name(code)
        colour = _COLOURS[authors.code(name.removesuffix(DISCARD_SUFFIX)) % len(_COLOURS)]
        not_trained = "sampled, not trained" if sampled[at[0]] else "not trained" if action[at[0]] else "not sampled"
        state = "trained" if trained[at[0]] else not_trained
        view.append(visible(name), style=f"bold {colour}")
        view.append(f" · {len(at)} tokens · {state}\n", style="dim")
        style = f"{colour} bold underline" if trained[at[0]] else colour
        ids = tokens.token_ids[at].tolist()
        alone = ((place, place + 1, f"{token} ") for place, token in enumerate(ids))
        for first, last, text in alone if decoder is None else pieces(ids, decoder):
            view.append(text if decoder is None else visible_lines(text).replace("\n", "↵\n"), style=style)
            if sampled[at[0]]:
                values = tokens.behavior_log_probs[at][first:last]
                view.append("[" + " ".join(f"{value:.2f}" for value in values) + "]", style="dim")
        view.append("\n")
    return view
