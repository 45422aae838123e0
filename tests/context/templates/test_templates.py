"""Random conversations: the text of transformers or a refusal, and no control token from content."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from context import Message, RenderError, TokenSequence, ToolCall, default_authors
from context.messages import to_template
from context.templates.row_forms import LOOKUP
from tests.fakes.trl_templates import TEMPLATES, model, reference, renderer, shapes

TEMPLATE = default_authors().code("template")


def theirs(name: str, messages: list[Message], tools: list[Any]) -> str:
    """What transformers writes, for messages in the form the template's own model card gives them."""
    rows = [to_template(message) for message in messages]
    for row in rows:
        if name == "gptoss" and "reasoning_content" in row:
            row["thinking"] = row["reasoning_content"]
        for call in row.get("tool_calls", ()) if name == "deepseekv3" else ():
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    text = reference(name).apply_chat_template(rows, tools=tools or None, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return text


def ours(name: str, tokens: TokenSequence) -> str:
    return model(name).codec.decode(tokens.token_ids.tolist())


def contents_hold_no_control_ids(name: str, tokens: TokenSequence) -> bool:
    content = tokens.token_ids[tokens.authors != TEMPLATE].tolist()
    return model(name).codec.added_ids.isdisjoint(content)


@st.composite
def conversations(draw: st.DrawFn, name: str) -> list[Message]:
    """Users, answers, thoughts, calls and results in an order that agents make, whatever they say."""
    pieces = st.sampled_from([*model(name).codec.added_tokens, "\uf8e00\uf8e1", '"', "\\", "\n", " ", "{", "é", "1"])
    words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    said = st.one_of(words, st.lists(pieces, min_size=1, max_size=4).map("".join))
    thought = st.none() | said
    takes_system, takes_calls = shapes(name)
    found = [Message("system", draw(said), "initialization")] if takes_system and draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        found.append(Message("user", draw(said)))
        if takes_calls and draw(st.booleans()):
            call = ToolCall("lookup", {"key": draw(said), "n": draw(st.integers())}, "call00001")
            found.append(Message("assistant", "", "initialization", (call,), reasoning=draw(thought)))
            found.append(Message("tool", draw(said), "env", name="lookup", tool_call_id="call00001"))
        found.append(Message("assistant", draw(said), "initialization", reasoning=draw(thought)))
    return found[: len(found) - draw(st.integers(0, 1))]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random_conversations_are_rendered_truly_or_refused(name: str, data: st.DataObject) -> None:
    messages = data.draw(conversations(name))
    tools = data.draw(st.sampled_from([[], [LOOKUP]]))
    try:
        tokens = renderer(name).initial(messages, tools)
    except RenderError:
        tame = [_tame(message) for message in messages]
        assert tame != messages
        renderer(name).initial(tame, tools)
        return
    if ours(name, tokens) != theirs(name, messages, tools):
        # A template that looks for its own control tokens finds them only where they are ones.
        assert any(spells_control_tokens(name, message) for message in messages)
    assert contents_hold_no_control_ids(name, tokens)


def spells_control_tokens(name: str, message: Message) -> bool:
    said = (message.content, message.reasoning or "", *(str(c.arguments.get("key")) for c in message.tool_calls))
    return any(model(name).codec.controls(text) for text in said)


def _tame(message: Message) -> Message:
    """Without what templates look for: ends of thoughts in what assistants say, a tool result posing as a user."""
    if message.role == "assistant" and message.content:
        return replace(message, content="x", reasoning="x")
    if message.role == "user" and message.content.startswith("<tool_response>"):
        return replace(message, content="x")
    return message
