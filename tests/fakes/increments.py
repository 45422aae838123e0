"""What follows a reply, for tests that look at that alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from context import Message, Renderer, TokenSequence
from context.templates.rendering.reply_end import Sampled

ASKED = (Message("user", "What is asked?"),)


def increment(
    renderer: Renderer,
    reply: Message,
    added: Sequence[Message],
    *,
    opening: Sequence[Message] = ASKED,
    tools: Sequence[Mapping[str, Any]] = (),
    stop: int | None = None,
) -> TokenSequence:
    """Behind a reply that ended in `stop`, any of the renderer's stop tokens when left out."""
    before = renderer.render(opening, tools)
    grown = renderer.render([*opening, reply, *added], tools, after=before)
    found = renderer.increment(before, grown, Sampled("", min(renderer.stop_ids) if stop is None else stop))
    assert found is not None, "the template rewrites what was shown"
    return found
