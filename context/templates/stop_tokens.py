"""What ends a reply, found by rendering: the control tokens a template writes behind an answer and behind calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from context.parse.choose import shared_opening
from context.templates.chat_template import ChatTemplate, RenderError
from context.templates.row_forms import LOOKUP
from context.tokens.codec import TokenCodec

_SAID = "pearl-0417"
_ASKED: dict[str, Any] = {"role": "user", "content": "x"}
_IDS = ("call00001", "call00002")
_RESULTS = [{"role": "tool", "content": "x", "name": "lookup", "tool_call_id": call_id} for call_id in _IDS]


def stop_tokens(template: ChatTemplate, codec: TokenCodec, declared: Collection[int] = ()) -> frozenset[int]:
    """The end of an answer and that of a turn of calls; where there is no end, what opens the turn that follows.

    `declared`: eos, and what the model's files list.
    """
    answer = _Ending(template, codec, {"role": "assistant", "content": _SAID}, [_ASKED])
    found = answer.find(declared, known=())
    calls = _Ending(template, codec, _calling(1), _RESULTS[:1], between=_between_calls(template, codec))
    return frozenset([*found, *calls.find(declared, known=found)])


class _Ending:
    """What stands behind a reply: as the last message, before a generation prompt, and before a message."""

    def __init__(
        self,
        template: ChatTemplate,
        codec: TokenCodec,
        reply: Mapping[str, Any],
        following: Sequence[Mapping[str, Any]],
        *,
        between: Collection[int] | None = None,
    ) -> None:
        rows = [_ASKED, reply]
        calls = between is not None
        last = _rendered(template, rows, prompted=False, tools=calls)
        prompted = _rendered(template, rows, prompted=True, tools=calls)
        followed = _rendered(template, [*rows, *following], prompted=True, tools=calls)
        self._prompt_ignored = last == prompted
        behind = [text.rpartition(_SAID)[2] for text in (last, prompted)]
        kept = codec.added_ids.difference(between or ())

        def controls(text: str) -> list[int]:
            return [token for token in codec.encode(text) if token in kept]

        self._ends = controls(shared_opening(*behind)) or controls(behind[0])
        self._next = controls(followed.partition(_SAID)[2])

    def find(self, declared: Collection[int], *, known: Collection[int]) -> list[int]:
        """The one token, if there is one. `known`: stops of other replies."""
        for wanted in (declared, known):
            token = next((token for token in self._ends if token in wanted), None)
            if token is not None:
                return [token]
        if self._ends:  # behind the end of turn stands a generation prompt that nobody asked for
            return [self._ends[0 if self._prompt_ignored else -1]]
        return self._next[:1]


def _between_calls(template: ChatTemplate, codec: TokenCodec) -> set[int]:
    """Control tokens between two calls of one turn: they belong to a call, and do not end the turn."""
    text = _rendered(template, [_ASKED, _calling(2)], prompted=False, tools=True)
    return set(codec.encode("".join(text.split(_SAID)[1:-1])))


def _calling(count: int) -> dict[str, Any]:
    function = {"name": "lookup", "arguments": {"key": _SAID}}
    calls = [{"type": "function", "id": call_id, "function": function} for call_id in _IDS[:count]]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _rendered(template: ChatTemplate, rows: Sequence[Mapping[str, Any]], *, prompted: bool, tools: bool) -> str:
    """Empty where the template refuses."""
    for schemas in ((LOOKUP,), ()) if tools else ((),):
        try:
            return template.render_rows(rows, tools=schemas, generation_prompt=prompted)
        except RenderError:
            continue
    return ""
