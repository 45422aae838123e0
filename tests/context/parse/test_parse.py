"""Replies read into messages; nothing the policy writes raises."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from context.parse import PARSERS, HermesParser, Llama3JsonParser, PythonicParser, ReactParser, ReplyParser
from tests.context.parse.dialects import ONE_CALL

HERMES, LLAMA = HermesParser(), Llama3JsonParser()
PYTHONIC, REACT = PythonicParser(), ReactParser()
ALL = [make(()) for make in PARSERS.values()]


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


@pytest.mark.parametrize("parser", ALL)
@pytest.mark.parametrize("text", ["The code is 78.", "", '{"code": 78}', "{not json"])
def test_text_without_a_call_is_final(parser, text: str) -> None:
    reply = parser.parse(text, stopped=True)
    assert (reply.outcome, reply.message.content, reply.problem) == ("final", text, None)
    assert (reply.message.role, reply.message.author) == ("assistant", "llm")


@pytest.mark.parametrize("parser", ALL)
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
    ('{"name": "f", "arguments": "key"}', "not valid JSON"),
    ('{"name": "f", "arguments": "[1]"}', '"arguments" of a tool call is not a JSON object'),
    ('{"name": "f", "arguments": [1]}', '"arguments" of a tool call is not a JSON object'),
    ('{"name": "f", "arguments": {}, "parameters": {}}', "arguments twice"),
    ('{"name": "f", "arguments": {}, "id": "<|im_start|>"}', "id of a tool call is not a plain word"),
    ("{}", '"name" of a tool call'),
    ("[]", "list of tool calls is empty"),
    ("[3]", "not a JSON object"),
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
        (hermes('{"name": "f", "arguments": {}}') + "</tool_call>", "a tool call is closed that was never opened"),
        (
            hermes('{"name": "f", "arguments": {}} extra'),
            "a tool call is not valid JSON: Extra data at character 31",
        ),
        (
            "<tool_call><tool_call>" + '{"name": "f", "arguments": {}}</tool_call>',
            "a tool call is not valid JSON: Expecting value at character 0",
        ),
    ],
)
def test_hermes_tags_that_do_not_pair_are_malformed(text: str, problem: str) -> None:
    reply = HERMES.parse(text, stopped=True)
    assert (reply.outcome, reply.problem) == ("malformed", problem)


@pytest.mark.parametrize("parser", ALL)
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
        "[f(a=[" + "[],1e1," * 3_300 + "1])]",
        "[f(a=" + "[" * 90_000 + ")]",
        "[f(a=" + "-" * 90_000 + "1)]",
        "[f(a=[" + "1," * 9_900 + "])]",
        "[f(a=" + "b." * 45_000 + "c)]",
        "[" + "f()," * 4_950 + "]",
        "Action: f\nAction Input: {}\n" * 3_000,
        "Action: f\n" * 1_000_000,
        "<think>" * 1_000_000,
        "<think></think>" * 500_000,
    ],
    ids=range(17),
)
def test_parse_takes_no_more_than_a_tenth_of_a_second(parser, text: str) -> None:
    check_seconds(parser, text)


@pytest.mark.parametrize("name", PARSERS)
def test_reply_full_of_calls_takes_no_more_than_a_tenth_of_a_second(name: str) -> None:
    check_seconds(PARSERS[name](()), ONE_CALL[name] * (95_000 // len(ONE_CALL[name])))


def check_seconds(parser: ReplyParser, text: str) -> None:
    """On a machine that reads 200,000 numbers of JSON in a hundredth; a slower one takes its time with both."""
    fastest = reference = float("inf")
    for _ in range(10):
        fastest = min(fastest, seconds(lambda: parser.parse(text, stopped=True)))
        if fastest < 0.1:
            return
        reference = min(reference, seconds(lambda: json.loads(NUMBERS)))
    assert fastest < 10 * reference


NUMBERS = "[" + "1," * 200_000 + "1]"


def seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def test_lone_surrogates_are_malformed_and_leave_storable_text() -> None:
    for parser in ALL:
        reply = parser.parse("a\ud800", stopped=True)
        assert (reply.outcome, reply.message.content) == ("malformed", "a\ufffd")


PIECES = st.sampled_from(
    [
        *(
            *("<tool_call>", "</tool_call>", "<|python_tag|>", '"name"', '"arguments"', '"parameters"', '"f"'),
            "{}",
        ),
        *(
            *("{", "}", "[", "]", ":", ",", '"', "1e999", "-1", "null", "NaN", "\\ud800", "\ud800", "\x00", "é"),
            "\n",
        ),
        *("<think>", "</think>", "[f(", "a=", ")]", "(", ")", "'", "\\", "**", "lambda:", "<|tool_call_start|>"),
        *("<|tool_call_end|>", "Action:", "Action Input:", "Final Answer:", "Observation:", "0x", "f''", "b''", "1j"),
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.lists(PIECES, max_size=30).map("".join)), st.booleans())
def test_parsers_never_raise(text: str, stopped: bool) -> None:
    for parser in ALL:
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


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z]{1,4}_", fullmatch=True), JSON_VALUES, max_size=3))
def test_pythonic_arguments_come_back_as_they_were_written(arguments: dict[str, object]) -> None:
    text = "[f(" + ", ".join(f"{key}={value!r}" for key, value in arguments.items()) + ")]"
    assert PYTHONIC.parse(text, stopped=True).message.tool_calls[0].arguments == arguments


def calls(text: str, parser=PYTHONIC) -> list[tuple[str, object]]:
    reply = parser.parse(text, stopped=True)
    assert (reply.outcome, reply.problem) == ("tool_calls", None)
    return [(call.name, call.arguments) for call in reply.message.tool_calls]


def test_pythonic_reads_parallel_calls() -> None:
    assert calls("[lookup(key='pearl', n=-2), store.put(rows=[1, (2.5, None)], flags={'a': True})]") == [
        ("lookup", {"key": "pearl", "n": -2}),
        ("store.put", {"rows": [1, [2.5, None]], "flags": {"a": True}}),
    ]


def test_pythonic_reads_json_words_as_templates_write_them() -> None:
    assert calls("[f(a=true, b=[null, false])]") == [("f", {"a": True, "b": [None, False]})]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<|python_tag|>[f(a=1)]", ""),
        ("Let me see.\n<|tool_call_start|>[f(a=1)]<|tool_call_end|>", "Let me see."),
        ("<|tool_call_start|>[f(a=1)]<|tool_call_end|>Looking.", "Looking."),
        ("<think>\nhm\n</think>\n\n[f(a=1)]", ""),
    ],
)
def test_pythonic_reads_what_follows_a_tag(text: str, content: str) -> None:
    assert calls(text) == [("f", {"a": 1})]
    assert PYTHONIC.parse(text, stopped=True).message.content == content


def test_pythonic_never_runs_anything() -> None:
    for body in (
        "[f(a=__import__('os').system('false'))]",
        "[f(a=open('x'))]",
        "[f(a=[x for x in 'ab'])]",
        "[f(a=1+1)]",
    ):
        reply = PYTHONIC.parse(body, stopped=True)
        assert (reply.outcome, reply.problem) == ("malformed", "an argument of a tool call is not a literal")


BAD_PYTHON = [
    ("[f(", "not valid Python"),
    ("[f(1)]", "an argument without a name"),
    ("[f(**{})]", "an argument without a name"),
    ("[f(a=1, a=2)]", "same key twice"),
    ("[f(a={'b': 1, 'b': 2})]", "same key twice"),
    ("[f(a={1: 2})]", "a key that is not text"),
    ("[f(a=1e999)]", "too large"),
    ("[f(a='\\ud800')]", "half a character"),
    ("[f(a=b'x')]", "not a literal"),
    ("[f(a=1j)]", "not a literal"),
    ("[f(a=-True)]", "not a literal"),
    ("[f(a=f'x')]", "not a literal"),
    ("[f(a=...)]", "not a literal"),
    ("[f(a={1, 2})]", "not a literal"),
    ("[f(), 3]", "holds something else"),
    ("[f()()]", "not the name of a tool"),
    ("[f(a=" + "[" * 80 + "]" * 80 + ")]", "nested too deeply"),
    ("[f(a=" + "9" * 5000 + ")]", "not valid Python"),
    ("[f(a=0x" + "f" * 3700 + ")]", "a number that is too long"),
    ("[f(a=-0o" + "7" * 5000 + ")]", "a number that is too long"),
    ("[f(a=[{'b': 0b" + "1" * 15000 + "}])]", "a number that is too long"),
    ("[f(a='\x00')]", "not valid Python"),
    ("<|tool_call_start|>[f(a=1)]", "not closed"),
    ("<|python_tag|>[]", "not a list of calls"),
    ("<|python_tag|>f(a=1)", "not a list of calls"),
]


@pytest.mark.parametrize(("text", "problem"), BAD_PYTHON, ids=range(len(BAD_PYTHON)))
def test_bad_python_is_malformed_and_says_why(text: str, problem: str) -> None:
    reply = PYTHONIC.parse(text, stopped=True)
    assert (reply.outcome, reply.message.content, reply.message.tool_calls) == ("malformed", text, ())
    assert reply.problem is not None and problem in reply.problem and len(reply.problem) <= 120


def test_react_reads_an_action_and_the_thought_before_it() -> None:
    text = 'Thought: I look it up.\nAction: lookup\nAction Input: {"key": "pearl",\n "n": 1}\n'
    assert calls(text, REACT) == [("lookup", {"key": "pearl", "n": 1})]
    assert REACT.parse(text, stopped=True).message.content == "Thought: I look it up."


def test_react_reads_several_actions() -> None:
    text = "".join(f'Action: f{i}\nAction Input: {{"i": {i}}}\n' for i in range(3))
    assert calls(text, REACT) == [(f"f{i}", {"i": i}) for i in range(3)]


def test_react_answer_is_what_stands_behind_its_label() -> None:
    reply = REACT.parse("Thought: done.\nFinal Answer: 78\nand so on", stopped=True)
    assert (reply.outcome, reply.message.content, reply.message.reasoning) == (
        "final",
        "78\nand so on",
        "Thought: done.",
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Action: f", '"Action:" and "Action Input:" must take turns'),
        ("Action Input: {}", '"Action:" and "Action Input:" must take turns'),
        ("Action: f\nAction: g\nAction Input: {}", '"Action:" and "Action Input:" must take turns'),
        ("Action: f\nAction Input: {}\nObservation: 78", '"Observation:" is not for the policy to write'),
        ("Action: f\nAction Input: {}\nFinal Answer: 78", "there is a final answer after a tool call"),
        ("Action: f\nAction Input: pearl", "a tool call is not valid JSON: Expecting value at character 0"),
        ("Action: f\nAction Input: [1]", '"Action Input:" is not a JSON object'),
        ("Action: look it up\nAction Input: {}", '"name" of a tool call is not the name of a tool'),
    ],
)
def test_react_that_breaks_its_order_is_malformed(text: str, problem: str) -> None:
    reply = REACT.parse(text, stopped=True)
    assert (reply.outcome, reply.problem, reply.message.content) == ("malformed", problem, text)


@pytest.mark.parametrize("parser", ALL)
@pytest.mark.parametrize(
    ("text", "thinking", "content"),
    [
        ("<think>\nhm, 78?\n</think>\n\n78", "hm, 78?", "78"),
        ("<think></think>78", "", "78"),
        ("hm\n</think>\n78", "hm", "78"),  # the template wrote the opening tag
        ("78 <think> 79", None, "78 <think> 79"),
        ("<think>a</think>b</think>c", "a", "b</think>c"),
    ],
)
def test_thinking_is_split_off(parser, text: str, thinking: str | None, content: str) -> None:
    reply = parser.parse(text, stopped=True)
    assert (reply.outcome, reply.message.reasoning, reply.message.content) == ("final", thinking, content)


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


@pytest.mark.parametrize("parser", ALL)
def test_thinking_without_an_end_is_malformed_or_truncated(parser) -> None:
    reply = parser.parse("<think>hm", stopped=True)
    assert (reply.outcome, reply.problem) == ("malformed", "the thinking is not closed with </think>")
    reply = parser.parse("<think>hm", stopped=False)
    assert (reply.outcome, reply.message.reasoning, reply.message.content) == ("truncated", "hm", "")
