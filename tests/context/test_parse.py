"""Replies read into messages; nothing the policy writes raises."""

from __future__ import annotations

import json
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from context import HermesParser, Llama3JsonParser, choose_parser
from tests.context.fakes import CHATML, LLAMA3

HERMES, LLAMA = HermesParser(), Llama3JsonParser()


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def test_hermes_reads_a_call() -> None:
    reply = HERMES.parse(hermes('{"name": "lookup", "arguments": {"key": "pearl"}}'), stopped=True)
    assert (reply.outcome, reply.problem, reply.message.content) == ("tool_calls", None, "")
    assert [(c.name, c.arguments, c.id) for c in reply.message.tool_calls] == [("lookup", {"key": "pearl"}, None)]


def test_hermes_reads_several_calls_and_the_text_before_them() -> None:
    calls = [hermes(json.dumps({"name": f"f{i}", "arguments": {"i": i}})) for i in range(3)]
    reply = HERMES.parse("Let me see.\n" + "\n".join(calls) + "\n", stopped=True)
    assert reply.outcome == "tool_calls"
    assert reply.message.content == "Let me see."
    assert [(c.name, c.arguments) for c in reply.message.tool_calls] == [(f"f{i}", {"i": i}) for i in range(3)]


@pytest.mark.parametrize("parser", [HERMES, LLAMA])
@pytest.mark.parametrize("text", ["The code is 78.", "", '{"code": 78}', "{not json"])
def test_text_without_a_call_is_final(parser, text: str) -> None:
    reply = parser.parse(text, stopped=True)
    assert (reply.outcome, reply.message.content, reply.problem) == ("final", text, None)
    assert (reply.message.role, reply.message.author) == ("assistant", "llm")


@pytest.mark.parametrize("parser", [HERMES, LLAMA])
def test_cut_reply_is_truncated_even_with_a_whole_call_in_it(parser) -> None:
    text = hermes('{"name": "lookup", "arguments": {}}')
    reply = parser.parse(text, stopped=False)
    assert (reply.outcome, reply.message.content, reply.message.tool_calls) == ("truncated", text, ())


@pytest.mark.parametrize("prefix", ["", "<|python_tag|>", "\n "])
@pytest.mark.parametrize("key", ["parameters", "arguments"])
def test_llama_reads_a_call(prefix: str, key: str) -> None:
    reply = LLAMA.parse(prefix + f'{{"name": "lookup", "{key}": {{"key": "pearl"}}}}', stopped=True)
    assert reply.outcome == "tool_calls"
    assert [(c.name, c.arguments) for c in reply.message.tool_calls] == [("lookup", {"key": "pearl"})]


BAD_JSON = [
    ("", "not valid JSON"),
    ("{", "not valid JSON"),
    ('{"name": "f", "arguments": {"a": 1,}}', "not valid JSON"),
    ('{"name": "f", "arguments": {}} extra', "not valid JSON: Extra data at character 31"),
    ('{"name": "f", "name": "g", "arguments": {}}', "same key twice"),
    ('{"name": "f", "arguments": {"a": 1, "a": 2}}', "same key twice"),
    ('{"name": "f", "arguments": {"a": 1e400}}', "too large"),
    ('{"name": "f", "arguments": {"a": NaN}}', "holds NaN"),
    ('{"name": "f", "arguments": {"a": -Infinity}}', "holds -Infinity"),
    ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", "too long"),
    ('{"name": "f", "arguments": {"a": "\\ud800"}}', "half a character"),
    ('{"name": "f", "arguments": {"a": ' + "[" * 10_000 + "]" * 10_000 + "}}", "nested too deeply"),
    ('{"name": "f", "arguments": {"a": ' + "[" * 80 + "]" * 80 + "}}", "nested too deeply"),
    ('{"name": "f", "arguments": ' + '{"a":' * 10_000 + "1" + "}" * 10_000 + "}", "nested too deeply"),
    ('{"name": "f", "arguments": "key"}', '"(arguments|parameters)" of a tool call is not a JSON object'),
    ('{"name": "f"}', '"(arguments|parameters)" of a tool call is not a JSON object'),
    ('{"name": 3, "arguments": {}}', '"name" of a tool call'),
    ('{"name": "<|im_start|>", "arguments": {}}', '"name" of a tool call'),
    ('{"name": "", "arguments": {}}', '"name" of a tool call'),
    ('["name"]', "not a JSON object"),
    ('"name"', "not a JSON object"),
]


@pytest.mark.parametrize(("parser", "wrap"), [(HERMES, hermes), (LLAMA, lambda body: "<|python_tag|>" + body)])
@pytest.mark.parametrize(("body", "problem"), BAD_JSON, ids=range(len(BAD_JSON)))
def test_bad_call_is_malformed_and_says_why(parser, wrap, body: str, problem: str) -> None:
    reply = parser.parse(wrap(body), stopped=True)
    assert reply.outcome == "malformed"
    assert reply.message.content == wrap(body)
    assert reply.message.tool_calls == ()
    assert reply.problem is not None and len(reply.problem) <= 120
    assert re.search(problem, reply.problem)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {}}', "a tool call is not closed"),
        ('{"name": "f", "arguments": {}}\n</tool_call>', "a tool call is closed that was never opened"),
        (hermes('{"name": "f", "arguments": {}}') + " and so on", "there is text after a tool call"),
        (
            "<tool_call><tool_call>" + '{"name": "f", "arguments": {}}</tool_call>',
            "a tool call is not closed",
        ),
    ],
)
def test_hermes_tags_that_do_not_pair_are_malformed(text: str, problem: str) -> None:
    reply = HERMES.parse(text, stopped=True)
    assert (reply.outcome, reply.problem) == ("malformed", problem)


@pytest.mark.parametrize("parser", [HERMES, LLAMA])
@pytest.mark.parametrize(
    "text",
    [
        hermes('{"name": "f", "arguments": {"a": "' + "x" * 10_000_000 + '"}}'),
        '{"name": "f", "parameters": {"a": "' + "x" * 10_000_000 + '"}}',
        hermes('{"name": "f", "arguments": {"a": [' + "[],1e1," * 500_000 + "1]}}"),
        "<tool_call>" * 1_000_000,
        hermes("[" * 90_000),
        '{"name": "f", "parameters": {"a": [' + "[],1e1," * 13_000 + "1]}}",
        "é" * 5_000_000,
    ],
    ids=range(7),
)
def test_parse_takes_no_more_than_a_tenth_of_a_second(parser, text: str) -> None:
    fastest = float("inf")
    for _ in range(3):
        started = time.process_time()
        parser.parse(text, stopped=True)
        fastest = min(fastest, time.process_time() - started)
    assert fastest < 0.1


def test_lone_surrogates_are_malformed_and_leave_storable_text() -> None:
    for parser in (HERMES, LLAMA):
        reply = parser.parse("a\ud800", stopped=True)
        assert (reply.outcome, reply.message.content) == ("malformed", "a\ufffd")


PIECES = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<|python_tag|>",
            '"name"',
            '"arguments"',
            '"parameters"',
            '"f"',
            "{}",
        ),
        *(
            "{",
            "}",
            "[",
            "]",
            ":",
            ",",
            '"',
            "1e999",
            "-1",
            "null",
            "NaN",
            "\\ud800",
            "\ud800",
            "\x00",
            "é",
            "\n",
        ),
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.lists(PIECES, max_size=30).map("".join)), st.booleans())
def test_parsers_never_raise(text: str, stopped: bool) -> None:
    for parser in (HERMES, LLAMA):
        reply = parser.parse(text, stopped=stopped)
        assert (reply.outcome == "truncated") == (not stopped)
        assert (reply.outcome == "tool_calls") == bool(reply.message.tool_calls)
        assert (reply.outcome == "malformed") == (reply.problem is not None)
        reply.message.content.encode()


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text("abc", min_size=1), JSON_VALUES, max_size=3))
def test_arguments_come_back_as_they_were_written(arguments: dict[str, object]) -> None:
    text = json.dumps({"name": "f", "arguments": arguments})
    assert LLAMA.parse(text, stopped=True).message.tool_calls[0].arguments == arguments
    if "tool_call>" not in text:
        assert HERMES.parse(hermes(text), stopped=True).message.tool_calls[0].arguments == arguments


def test_auto_chooses_by_the_template() -> None:
    assert isinstance(choose_parser("auto", CHATML), HermesParser)
    assert isinstance(choose_parser("auto", LLAMA3), Llama3JsonParser)
    assert isinstance(choose_parser("hermes", LLAMA3), HermesParser)
    with pytest.raises(ValueError, match=r"context\.parser must be one of auto, hermes, llama3_json, got 'xml'"):
        choose_parser("xml", CHATML)
