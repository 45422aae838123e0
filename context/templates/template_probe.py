"""What a chat template does to a conversation that grows: keep what it wrote, or write some of it anew."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from context.templates.chat_template import ChatTemplate, RenderError
from context.templates.rendering.contents import shared_opening

Thinking = Literal["none", "empty", "some"]
"""What replies have before their content: no thinking, an empty block of it, or thoughts."""
Row = dict[str, Any]
_Key = tuple[str, int]
_Marks = dict[_Key, tuple[str, str]]
_CALL_IDS = ("call00001", "call00002")  # nine letters and digits, as Mistral's templates demand
_MARK = re.compile("\uf8e0(thinking|text)([0-9]+)\uf8e1")


def changes(
    template: ChatTemplate, rows: Sequence[Row], *, reply: int, tools: Sequence[Mapping[str, Any]]
) -> tuple[str, ...] | None:
    """What the messages behind number `reply` change in the rendering of it and of those before it.

    None: the template refuses the conversation, or never shows the reply. Contents have to be `mark`s.
    """
    try:
        seen = template.render_rows(rows[:reply], tools=tools, generation_prompt=True)
        stopped = template.render_rows(rows[:reply], tools=tools, generation_prompt=False)
        ended = template.render_rows(_with_thought(rows[: reply + 1]), tools=tools, generation_prompt=False)
        grown = template.render_rows(rows, tools=tools, generation_prompt=True)
    except RenderError:
        return None
    first, last, now = _marked(seen), _marked(ended), _marked(grown)
    if ("text", reply) not in last:
        return None
    found = dict.fromkeys(
        _change(rows, key, now) for key, before in first.items() if key not in now or before[0] != now[key][0]
    )
    prompt = list(first)[-1] if first else None
    if not found and prompt and not now[prompt][1].startswith(first[prompt][1]):
        found[f"message {reply} (assistant): begins otherwise than the prompt for it"] = None
    thinking, text_key = ("thinking", reply), ("text", reply)
    if text_key not in now:
        found[_change(rows, text_key, now)] = None
    elif thinking in last and not _thought_again(last, now, thinking, text_key):
        found[f"message {reply} (assistant): its thinking is left out"] = None
    else:
        # What a text ends in that no reply follows: Phi-3's eos.
        closing = stopped.removeprefix(shared_opening(seen, stopped))
        if not now[text_key][1].startswith(last[text_key][1].removesuffix(closing).rstrip()):
            found[f"message {reply} (assistant): ends in another way"] = None
    return tuple(found)


def _with_thought(rows: Sequence[Row]) -> list[Row]:
    """With a thought where the last reply has an empty one: templates may leave out an empty block that was said."""
    *before, last = rows
    if last.get("reasoning_content") == "":
        last = {**last, "reasoning_content": mark(len(before), "thinking")}
    return [*before, last]


def _thought_again(last: _Marks, now: _Marks, thinking: _Key, text_key: _Key) -> bool:
    """Is the thinking of the reply still there? An empty one is found by what stands around it, white space aside."""
    around = "".join((last[thinking][0] + last[text_key][0]).split())
    return thinking in now or "".join(now[text_key][0].split()) == around


def mark(index: int, kind: Literal["thinking", "text"] = "text") -> str:
    """A content that is found again whatever is written around it."""
    return f"\uf8e0{kind}{index}\uf8e1"


def _marked(text: str) -> _Marks:
    """Every mark with the template text before and behind it; the first appearance counts."""
    parts = _MARK.split(text)
    found: _Marks = {}
    for i in range(0, len(parts) - 1, 3):
        found.setdefault((parts[i + 1], int(parts[i + 2])), (parts[i], parts[i + 3]))
    return found


def _change(rows: Sequence[Row], key: _Key, now: Mapping[tuple[str, int], object]) -> str:
    kind, index = key
    where = f"message {index} ({rows[index]['role']})"
    if key not in now:
        return f"{where}: its thinking is left out" if kind == "thinking" else f"{where}: is left out"
    if ("thinking", index) not in now and "reasoning_content" in rows[index]:
        return f"{where}: its thinking is left out"
    return f"{where}: is written differently"


def conversation(plan: str, *, thinking: Thinking = "none") -> list[Row]:
    """Marked messages, a letter each: s(ystem), u(ser), a(nswer), c(all), p(arallel calls), r(esult), e(mpty)."""
    return [_row(index, letter, plan, thinking) for index, letter in enumerate(plan)]


def _row(index: int, letter: str, plan: str, thinking: Thinking) -> Row:
    if letter in "su":
        return {"role": "system" if letter == "s" else "user", "content": mark(index)}
    if letter == "r":
        answered = plan[: index + 1].rpartition("p")[2]
        call_id = _CALL_IDS[answered == "rr"]
        return {"role": "tool", "content": mark(index), "name": "lookup", "tool_call_id": call_id}
    row: Row = {"role": "assistant", "content": mark(index) if letter == "a" else ""}
    if thinking != "none":
        row["reasoning_content"] = "" if thinking == "empty" else mark(index, "thinking")
    if letter in "cp":
        function = {"name": "lookup", "arguments": {"key": mark(index)}}
        ids = _CALL_IDS[: 1 + (letter == "p")]
        row["tool_calls"] = [{"type": "function", "id": call_id, "function": function} for call_id in ids]
    return row
