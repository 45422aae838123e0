import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from context import Message
from context.parse import PARSERS, HermesParser, Llama3JsonParser
from tests.context.parse.dialects import CONTROLS, ONE_CALL, hermes

HERMES, LLAMA = HermesParser(), Llama3JsonParser()
ALL = [make(()) for make in PARSERS.values()]


PIECES = st.sampled_from(
    [*CONTROLS, *"{}[]():,\"'\\\né", '"name"', "[f(", "a=", "1e999", "NaN", "\\ud800", "\ud800", "\x00", "0x"]
)
# Calls with pieces in the middle of them, and cut ones.
BROKEN = st.tuples(
    st.sampled_from([*ONE_CALL.values()]), st.integers(0, 60), st.integers(0, 60), st.lists(PIECES, max_size=3)
)
CALLS = BROKEN.map(lambda drawn: drawn[0][: drawn[1]] + "".join(drawn[3]) + drawn[0][drawn[2] :])


@settings(max_examples=600, deadline=None)
@given(st.one_of(st.text(), st.lists(PIECES, max_size=30).map("".join), CALLS), st.booleans())
def test_parsers_never_raise(text: str, stopped: bool) -> None:
    for parser in ALL:
        reply = parser.parse(text, stopped=stopped)
        assert (reply.outcome == "truncated") == (not stopped)
        assert (reply.outcome == "tool_calls") == bool(reply.message.tool_calls)
        assert (reply.outcome == "malformed") == (reply.problem is not None)
        reply.message.content.encode()
        found = [(call.name, dict(call.arguments), call.id) for call in reply.message.tool_calls]
        json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("parser", ALL)
@pytest.mark.parametrize(
    ("text", "thinking", "content"),
    [
        *((text, None, text) for text in ("The code is 78.", "", '{"code": 78}', "{not json")),
        ("<think>\nhm, 78?\n</think>\n\n78", "hm, 78?", "78"),
        ("<think></think>78", "", "78"),
        ("hm\n</think>\n78", "hm", "78"),  # the template wrote the opening tag
        ("78 <think> 79", None, "78 <think> 79"),
        ("<think>a</think>b</think>c", "a", "b</think>c"),
    ],
)
def test_text_is_final_and_its_thinking_split_off(parser, text: str, thinking: str | None, content: str) -> None:
    reply = parser.parse(text, stopped=True)
    assert (reply.outcome, reply.problem) == ("final", None)
    assert reply.message == Message("assistant", content, "llm", reasoning=thinking)


def test_end_of_thinking_within_an_argument_ends_nothing() -> None:
    call = hermes('{"name": "write", "arguments": {"text": "a </think> b"}}')
    for text, thinking in ((call, None), (f"<think>hm</think>{call}", "hm")):
        reply = HERMES.parse(text, stopped=True)
        assert (reply.outcome, reply.message.reasoning) == ("tool_calls", thinking)
        assert reply.message.tool_calls[0].arguments == {"text": "a </think> b"}
    reply = LLAMA.parse('{"name": "write", "parameters": {"text": "</think>"}}', stopped=True)
    assert reply.message.tool_calls[0].arguments == {"text": "</think>"}


def test_call_inside_thinking_is_no_call() -> None:
    call = hermes('{"name": "f", "arguments": {}}')
    assert HERMES.parse(f"<think>{call}</think>no", stopped=True).outcome == "final"
    assert len(HERMES.parse(f"<think>{call}</think>{call}", stopped=True).message.tool_calls) == 1


LONG = [
    hermes('{"name": "f", "arguments": {"a": [' + "[],1e1," * 500_000 + "1]}}"),
    "<tool_call>" * 1_000_000,
    "<think></think>" * 500_000,
    "[f(a=[" + "[],1e1," * 3_300 + "1])]",
    "[f(a=" + "-" * 90_000 + "1)]",
    "[f(a=" + "b." * 45_000 + "c)]",
    "Action: f\nAction Input: {}\n" * 3_000,
]


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_long_replies_have_an_outcome(name: str) -> None:
    for text in (*LONG, ONE_CALL[name] * (95_000 // len(ONE_CALL[name]))):
        assert PARSERS[name](()).parse(text, stopped=True).outcome in ("final", "tool_calls", "malformed")
