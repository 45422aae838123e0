"""Replies that somebody wrote in the policy's place: where they stand, and what a policy says to say one.

Its turn is all that the policy would have had to sample: what follows the generation prompt, markup of thinking and
calls among it, up to and with the stop token. Texts here are renderings with a numbered mark before and behind each
content.
"""

from collections.abc import Callable, Mapping, Sequence, Set

from context.parse.choose import shared_opening
from context.templates.chat_template import ChatTemplate, RenderError
from context.templates.rendering import marks
from context.templates.rendering.contents import Row
from context.templates.rendering.marks import Span, Written, inner, own
from context.tokens.codec import TokenCodec

_THINK, _END_THINK = "<think>", "</think>"


def turn_spans(
    marked: str,
    write: Callable[[int, bool], str],
    speakers: Mapping[int, str],
    codec: TokenCodec,
    stop_ids: frozenset[int],
) -> list[Span]:
    """The turns of these messages in the text without marks; `write` renders the first so many, prompted or not."""
    spans = []
    for number, author in speakers.items():
        prompt, ended = write(number, True), write(number + 1, False)
        first = _behind(marked, prompt, write(number, False), codec)
        end = _end(marked, first, prompt, ended, codec, stop_ids)
        before, turn = (len(marks.numbered_spans(part)[0]) for part in (marked[:first], marked[first:end]))
        spans.append(Span(before, before + turn, author))
    return spans


def _behind(marked: str, prompt: str, without: str, codec: TokenCodec) -> int:
    """The first character of a message's turn in `marked`, the whole conversation.

    It is where the generation prompt ends, or where the message parts from it: a template may open thinking in its
    prompt, and not in earlier turns. `prompt` and `without` are the conversation before the message, with a generation
    prompt and without. Raises RenderError where the message is not written like a reply at all.
    """
    if not prompt:  # no token before it could predict the first one
        raise RenderError(
            "chat template must write something before an action author's message, got nothing. Begin with another one."
        )
    if marked.startswith(prompt):
        return len(prompt)
    content = marks.last_end(prompt)
    at = marked.find(content)  # what is before that content, a template may write in another way
    written = marked[at : marks.next_begin(marked, at + len(content))]
    shared = len(shared_opening(_from(content, prompt), written)) - len(content)
    cut = len(content) + codec.boundary(written[len(content) :], shared)
    if at < 0 or cut <= len(_from(content, without)):
        raise _unlike_a_reply(written[-40:])
    return at + cut


def _end(marked: str, start: int, prompt: str, ended: str, codec: TokenCodec, stop_ids: frozenset[int]) -> int:
    """Where the turn that begins at `start` ends: behind its stop token.

    A template that ends earlier turns otherwise than with the stop token of the last one has the turn end with its last
    content. `ended` is the conversation up to the message.
    """
    content = marks.last_end(ended)
    if content and content not in prompt:
        end_of_reply = marked.find(content, start) + len(content)
        tail = ended.rpartition(content)[2]
        if end_of_reply < start + len(content):
            raise _unlike_a_reply(marked[start : start + 40])
    else:
        end_of_reply = start
        tail = ended.removeprefix(prompt)
        tail = tail.rpartition(content)[2] if content else tail
    behind = marked[end_of_reply : marks.next_begin(marked, end_of_reply)]
    stop, expected = (
        next((found for found in codec.controls(text) if found.token in stop_ids), None) for text in (behind, tail)
    )
    if stop is not None and expected is not None and stop.token == expected.token:
        return end_of_reply + stop.end
    return end_of_reply + len(tail) if marked.startswith(tail, end_of_reply) else end_of_reply


def _from(content: str, text: str) -> str:
    """The text from its last content on."""
    return content + text.rpartition(content)[2] if content else text


def _unlike_a_reply(text: str) -> RenderError:
    return RenderError(
        "chat template must write an action author's message as it writes a reply, behind the generation prompt, "
        f"got one that does not at {text!r}. Use author 'initialization', or another template."
    )


def written_reply(
    template: ChatTemplate, rows: Sequence[Row], codec: TokenCodec, stop_ids: Set[int]
) -> tuple[Written, Written]:
    """The prompt for a reply, and the reply with what ends it. `rows` are a conversation that ends in the reply.

    `template` marks its own control tokens. Some open a thought in the prompt and leave thoughts out of what was said:
    there the reply closes it.
    """
    prompt = Written(template.render(rows[:-1], generation_prompt=True))
    whole = Written(template.render(rows, generation_prompt=False))
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
    before = Written(template.render(rows[:-1], generation_prompt=False)).text
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
        grown = Written(template.render([*rows, following], generation_prompt=False)).text
    except RenderError:
        return ""
    kept = rows[-1]["content"]
    behind = grown[grown.rfind(kept) + len(kept) :] if kept else grown[len(whole.rstrip()) :]
    return next((behind[c.first : c.end] for c in codec.controls(behind) if c.token in stop_ids), "")
