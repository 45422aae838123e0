"""A reply as its template writes it, from behind the prompt for it: what a policy says to say this."""

from __future__ import annotations

from collections.abc import Sequence, Set

from context.parse.choose import shared_opening
from context.templates.chat_template import ChatTemplate, RenderError
from context.templates.rendering.contents import Row
from context.templates.rendering.marks import Written, inner, own
from context.tokens.codec import TokenCodec

_THINK, _END_THINK = "<think>", "</think>"


def written_reply(
    template: ChatTemplate, rows: Sequence[Row], codec: TokenCodec, stop_ids: Set[int]
) -> tuple[Written, Written]:
    """The prompt for a reply, and the reply with what ends it. `rows` are a conversation that ends in the reply.

    `template` marks its own control tokens. Some open a thought in the prompt and leave thoughts out of what was said:
    there the reply closes it.
    """
    prompt = Written(template.render_rows(rows[:-1], generation_prompt=True))
    whole = Written(template.render_rows(rows, generation_prompt=False))
    said = whole.rest(prompt) or _behind_another_prompt(template, rows, codec, prompt, whole)
    ends = [found.token for found in codec.controls(said.text) if inner(said.text, found) in said.own]
    if not stop_ids & {*ends}:
        header = _next_header(template, rows, whole.text, codec, stop_ids)
        said = Written(said.marked.rstrip() + own(header, [(0, len(header))]))
    return prompt, said


def _behind_another_prompt(
    template: ChatTemplate, rows: Sequence[Row], codec: TokenCodec, prompt: Written, whole: Written
) -> Written:
    """The reply where the prompt ends in what the template does not write in front of replies that were said."""
    shared = len(shared_opening(prompt.text, whole.text))
    opened = prompt.text.rfind(_THINK)
    if opened >= 0:
        shared = min(shared, opened)
    before = Written(template.render_rows(rows[:-1], generation_prompt=False)).text
    if shared <= len(before) < len(prompt.text):
        raise RenderError(
            "chat template must begin a reply as it does when it asks for one, got one that does not. "
            "Set context.template: hermes, or another template."
        )
    only_in_prompt = prompt.text[shared:]
    closed = whole.find(_END_THINK, shared, codec)
    if closed >= 0 and whole.text[shared:].lstrip().startswith(_THINK):
        shared = closed + len(_END_THINK)
        shared += len(whole.text[shared:]) - len(whole.text[shared:].lstrip("\n"))
    said = whole.behind(shared)
    if _THINK not in only_in_prompt or _END_THINK in only_in_prompt:
        return said
    thought, end = str(rows[-1].get("reasoning_content", "")).strip(), own(_END_THINK, [(0, len(_END_THINK))])
    return Written(f"{thought}\n{end}\n\n{said.marked}")


def _next_header(template: ChatTemplate, rows: Sequence[Row], whole: str, codec: TokenCodec, stop_ids: Set[int]) -> str:
    """The token that opens the next turn, where that is what ends a reply."""
    calls = rows[-1].get("tool_calls")
    following: Row = {"role": "user", "content": "x"}
    if calls:
        following = {"role": "tool", "content": "x", "name": calls[0]["function"]["name"]}
        if "id" in calls[0]:
            following["tool_call_id"] = calls[0]["id"]
    try:
        grown = Written(template.render_rows([*rows, following], generation_prompt=False)).text
    except RenderError:
        return ""
    kept = rows[-1]["content"]
    behind = grown[grown.rfind(kept) + len(kept) :] if kept else grown[len(whole.rstrip()) :]
    return next((behind[c.first : c.end] for c in codec.controls(behind) if c.token in stop_ids), "")
