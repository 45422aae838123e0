"""A reply as its template writes it, from behind the prompt for it: what a policy says to say this."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from context.templates.chat_template import ChatTemplate, RenderError
from context.templates.rendering.contents import Row, shared_opening
from context.tokens.codec import TokenCodec

_THINK, _END_THINK = "<think>", "</think>"


def written_reply(
    template: ChatTemplate, rows: Sequence[Row], codec: TokenCodec, stop_ids: Collection[int]
) -> tuple[str, str]:
    """The prompt for a reply, and the reply with what ends it. `rows` are a conversation that ends in the reply.

    Some templates open a thought in the prompt and leave thoughts out of what was said: there the reply closes it.
    """
    prompt = template.render_rows(rows[:-1], generation_prompt=True)
    whole = template.render_rows(rows, generation_prompt=False)
    said = whole[len(prompt) :] if whole.startswith(prompt) else _behind_another_prompt(template, rows, prompt, whole)
    if not any(control.token in stop_ids for control in codec.controls(said)):
        said = said.rstrip() + _next_header(template, rows, whole, codec, stop_ids)
    return prompt, said


def _behind_another_prompt(template: ChatTemplate, rows: Sequence[Row], prompt: str, whole: str) -> str:
    """The reply where the prompt ends in what the template does not write in front of replies that were said."""
    shared = len(shared_opening(prompt, whole))
    opened = prompt.rfind(_THINK)
    if opened >= 0:
        shared = min(shared, opened)
    before = template.render_rows(rows[:-1], generation_prompt=False)
    only_in_prompt, said = prompt[shared:], whole[shared:]
    if shared <= len(before) < len(prompt):
        raise RenderError(
            "chat template must begin a reply as it does when it asks for one, got one that does not. "
            "Set context.template: hermes, or another template."
        )
    thought, closed, rest = said.partition(_END_THINK)
    if closed and thought.lstrip().startswith(_THINK):
        said = rest.lstrip("\n")
    if _THINK not in only_in_prompt or _END_THINK in only_in_prompt:
        return said
    return f"{str(rows[-1].get('reasoning_content', '')).strip()}\n{_END_THINK}\n\n{said}"


def _next_header(
    template: ChatTemplate, rows: Sequence[Row], whole: str, codec: TokenCodec, stop_ids: Collection[int]
) -> str:
    """The token that opens the next turn, where that is what ends a reply."""
    calls = rows[-1].get("tool_calls")
    following: Row = {"role": "user", "content": "x"}
    if calls:
        following = {"role": "tool", "content": "x", "name": calls[0]["function"]["name"]}
        if "id" in calls[0]:
            following["tool_call_id"] = calls[0]["id"]
    try:
        grown = template.render_rows([*rows, following], generation_prompt=False)
    except RenderError:
        return ""
    kept = rows[-1]["content"]
    behind = grown[grown.rfind(kept) + len(kept) :] if kept else grown[len(whole.rstrip()) :]
    return next((behind[c.first : c.end] for c in codec.controls(behind) if c.token in stop_ids), "")
