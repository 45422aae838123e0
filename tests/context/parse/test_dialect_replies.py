"""What a template writes is read back equal, in every dialect; and what a dialect forgives, and what it does not."""

import json
import random
import zlib

import pytest

from context.parse import PARSERS, Reply
from tests.context.parse.dialects import DIALECTS, ONE_CALL, SECTION, Dialect, drawn_reply, hermes, tools_of

COMMENT = "<|channel|>commentary<|message|>"
CONVERSATIONS = 200
"""Of each dialect, shared by its templates."""


def read(name: str, text: str) -> Reply:
    return PARSERS[name](()).parse(text, stopped=True)


def calls(name: str, text: str) -> list[tuple[str, object]]:
    reply = read(name, text)
    assert (reply.outcome, reply.problem) == ("tool_calls", None)
    return [(call.name, call.arguments) for call in reply.message.tool_calls]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.template)
def test_calls_are_read_back_as_they_were_written(dialect: Dialect) -> None:
    chance = random.Random(zlib.crc32(dialect.template.encode()))
    for _ in range(-(-CONVERSATIONS // sum(other.parser == dialect.parser for other in DIALECTS))):
        row = drawn_reply(dialect, chance)
        text = dialect.written(row)
        read = dialect.parse(tools_of(row)).parse(text, stopped=True)
        assert (read.outcome, read.problem) == ("tool_calls", None), text
        expected = [(it["function"]["name"], it["function"]["arguments"], it.get("id")) for it in row["tool_calls"]]
        found = [(call.name, dict(call.arguments), call.id) for call in read.message.tool_calls]
        assert repr(sorted_keys(found)) == repr(sorted_keys(expected)), text  # 1 and True are equal, and not the same
        assert read.message.content.strip() == row["content"], text
        assert (read.message.reasoning or "").strip() == row.get("reasoning_content", ""), text


def sorted_keys(value: object) -> object:
    """Gemma's template sorts the keys."""
    if isinstance(value, dict):
        return {key: sorted_keys(value[key]) for key in sorted(value)}
    return [sorted_keys(row) for row in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("name", ONE_CALL)
def test_text_behind_a_call_is_forgiven(name: str) -> None:
    text = ONE_CALL[name] + ("<|call|>" if name == "harmony" else "") + "\nand so on"
    if name == "harmony":  # every message has a channel
        text = text.replace("\nand so on", "<|start|>assistant<|channel|>commentary<|message|>and so on")
    assert calls(name, text) == [("f", {"a": 1})]
    kept = {"gemma": "and so on", "harmony": "and so on"}
    assert read(name, text).message.content == kept.get(name, "")


@pytest.mark.parametrize("number", ["0x" + "f" * 3700, "9" * 4400, "0o" + "7" * 5000, "0b" + "1" * 20000])
@pytest.mark.parametrize("name", ONE_CALL)
def test_numbers_that_nothing_can_write_down_are_malformed_or_text(name: str, number: str) -> None:
    text = ONE_CALL[name].replace("1", number) if name != "kimi" else ONE_CALL[name].replace(": 1", f": {number}")
    reply = read(name, text)
    assert reply.outcome == "malformed" or reply.message.tool_calls[0].arguments == {"a": number}
    assert (reply.outcome == "malformed") == (name not in ("qwen3_coder", "glm", "minimax"))
    json.dumps([dict(call.arguments) for call in reply.message.tool_calls])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "f"}', {}),
        ('{"name": "f", "arguments": null}', {}),
        ('{"name": "f", "arguments": ""}', {}),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', {"a": 1}),
        ('{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}', {"a": 1}),
        ('{"function": "f", "parameters": {"a": 1}}', {"a": 1}),
        ('{"name": "f", "arguments": {"a": "<tool_call>{}</tool_call>"}}', {"a": "<tool_call>{}</tool_call>"}),
    ],
)
def test_json_calls_are_read_in_every_common_form(text: str, arguments: dict[str, object]) -> None:
    assert calls("hermes", f"<tool_call>{text}</tool_call>") == [("f", arguments)]
    assert calls("llama3_json", text) == [("f", arguments)]
    assert calls("mistral", f"[TOOL_CALLS][{text}]") == [("f", arguments)]
    assert calls("pythonic", "[f(a=true, b=[null, false])]") == [("f", {"a": True, "b": [None, False]})]


@pytest.mark.parametrize(
    ("name", "text", "content", "count"),
    [
        *(("llama3_json", ONE_CALL["llama3_json"] + between + ONE_CALL["llama3_json"], "", 2) for between in "; , \n"),
        ("llama3_json", ONE_CALL["llama3_json"] * 2, "", 2),
        ("llama3_json", "<|python_start|>I look.<|python_end|>" + ONE_CALL["llama3_json"], "I look.", 1),
        ("harmony", f"{COMMENT}I look.<|end|><|start|>assistant" + ONE_CALL["harmony"], "I look.", 1),
        ("pythonic", "<|python_tag|>[f(a=1)]", "", 1),
        ("pythonic", "Let me see.\n<|tool_call_start|>[f(a=1)]<|tool_call_end|>", "Let me see.", 1),
        ("pythonic", "<|tool_call_start|>[f(a=1)]<|tool_call_end|>Looking.", "Looking.", 1),
        ("pythonic", "<think>\nhm\n</think>\n\n[f(a=1)]", "", 1),
    ],
)
def test_calls_stand_behind_or_beside_text(name: str, text: str, content: str, count: int) -> None:
    assert calls(name, text) == [("f", {"a": 1})] * count
    assert read(name, text).message.content == content


def test_id_beside_a_name_is_kept() -> None:
    (call,) = read("mistral", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}").message.tool_calls
    assert call.id == "abcdefghi"


@pytest.mark.parametrize("name", PARSERS)
def test_thought_that_the_prompt_opened_and_nobody_closed_is_never_final(name: str) -> None:
    for text in ("<think>\nIt is 78.", "<think>\n" + ONE_CALL[name], "<think>"):
        if name == "harmony" and "<|" in text:
            continue  # its own thinking has a channel
        reply = read(name, text)
        assert (reply.outcome, reply.problem) == ("malformed", "the thinking is not closed with </think>")
        assert PARSERS[name](()).parse(text, stopped=False).outcome == "truncated"


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("command_a", "<|START_THINKING|>hm", "the thinking is not closed with <|END_THINKING|>"),
        ("mistral", "[THINK]hm", "the thinking is not closed with [/THINK]"),
        ("gemma", "<|channel>thought\nhm", "the thinking is not closed with <channel|>"),
        ("kimi_k3", "<|open|>think<|sep|>hm", "the thinking is not closed with <|close|>think<|sep|>"),
        ("harmony", "<|channel|>analysis<|message|>hm<|end|>", "the thinking is not followed by an answer"),
    ],
)
def test_thinking_in_own_tags_is_closed_or_malformed(name: str, text: str, problem: str) -> None:
    reply = read(name, text)
    assert (reply.outcome, reply.problem) == ("malformed", problem)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("command_a", "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>78<|END_RESPONSE|>"),
        ("command_a", "hm<|END_THINKING|>78<|END_RESPONSE|>"),  # the template opened both
        ("mistral", "[THINK]hm[/THINK]78"),
        ("gemma", "<|channel>thought\nhm\n<channel|>78"),
        ("harmony", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>78<|return|>"),
        ("kimi", "<think>hm</think>78"),
        ("react", "hm\nFinal Answer: 78"),
        ("kimi_k3", "hm<|close|>think<|sep|><|open|>response<|sep|>78<|close|>response<|sep|><|close|>message<|sep|>"),
    ],
)
def test_answer_stands_behind_the_thinking(name: str, text: str) -> None:
    reply = read(name, text)
    assert (reply.outcome, reply.message.reasoning, reply.message.content) == ("final", "hm", "78")


CODER, COMMAND = "<tool_call><function=f>{}</function></tool_call>", "<tool_call>f{}</tool_call>"
BAD_JSON = [
    ("", "not valid JSON"),
    ('{"name": "f", "arguments": {"a": 1,}}', "not valid JSON"),
    ('{"name": "f", "arguments": {"a": 1, "a": 2}}', "same key twice"),
    ('{"name": "f", "arguments": {"a": 1e400}}', "too large"),
    ('{"name": "f", "arguments": {"a": NaN}}', "holds NaN"),
    ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", "too long"),
    ('{"name": "f", "arguments": {"a": "\\ud800"}}', "half a character"),
    ('{"name": "f", "arguments": {"a": ' + "[" * 80 + "]" * 80 + "}}", "nested too deeply"),
    ('{"name": "f", "arguments": ' + '{"a":' * 10_000 + "1" + "}" * 10_000 + "}", "nested too deeply"),
    ('{"name": "f", "arguments": "[1]"}', '"arguments" of a tool call is not a JSON object'),
    ('{"name": "f", "arguments": {}, "parameters": {}}', "arguments twice"),
    ('{"name": "f", "arguments": {}, "id": "<|im_start|>"}', "id of a tool call is not a plain word"),
    ("[]", "list of tool calls is empty"),
    ("[3]", "not a JSON object"),
    ('{"name": "<|im_start|>", "arguments": {}}', '"name" of a tool call'),
]
BAD_PYTHON = [
    ("[f(", "not valid Python"),
    ("[f(1)]", "an argument without a name"),
    ("[f(a=1, a=2)]", "same key twice"),
    ("[f(a={'b': 1, 'b': 2})]", "same key twice"),
    ("[f(a={1: 2})]", "a key that is not text"),
    ("[f(a=1e999)]", "holds Infinity"),
    ("[f(a=b'x')]", "not a literal"),
    *((f"[f(a={run})]", "not a literal") for run in ("__import__('os')", "[x for x in 'ab']", "1+1")),
    ("[f(), 3]", "holds something else"),
    ("[f()()]", "not the name of a tool"),
    ("[f(a=" + "[" * 80 + "]" * 80 + ")]", "nested too deeply"),
    ("[f(a=" + "9" * 5000 + ")]", "not valid Python"),
    ("[f(a=0x" + "f" * 3700 + ")]", "not a literal"),
    ("<|tool_call_start|>[f(a=1)]", "not closed"),
    ("<|python_tag|>f(a=1)", "not a list of calls"),
]
REACT = [
    ("Action: f", '"Action:" and "Action Input:" must take turns'),
    ("Action: f\nAction Input: {}\nObservation: 78", '"Observation:" is not for the policy to write'),
    ("Action: f\nAction Input: {}\nFinal Answer: 78", "there is a final answer after a tool call"),
    ("Action: f\nAction Input: pearl", "a tool call is not valid JSON: Expecting value at character 0"),
    ("Action: f\nAction Input: [1]", '"Action Input:" is not a JSON object'),
    ("Action: look it up\nAction Input: {}", '"name" of a tool call is not the name of a tool'),
]
CALL = '{"name": "f", "arguments": {}}'
BAD = [
    *(("hermes", hermes(body), problem) for body, problem in BAD_JSON),
    *(("llama3_json", "<|python_tag|>" + body, problem) for body, problem in BAD_JSON),
    *(("pythonic", text, problem) for text, problem in BAD_PYTHON),
    *(("react", text, problem) for text, problem in REACT),
    ("hermes", f"<tool_call>\n{CALL}", "a tool call is not closed"),
    ("hermes", f"{CALL}\n</tool_call>", "a tool call is closed that was never opened"),
    ("hermes", hermes(CALL + " extra"), "a tool call is not valid JSON: Extra data at character 31"),
    ("qwen3_coder", "<tool_call></tool_call>", "a tool call holds nothing"),
    ("qwen3_coder", "<tool_call>\n<function=f>\n", "a tool call is not closed"),
    ("qwen3_coder", "<tool_call>f</tool_call>", "a tool call has no name in its tag"),
    ("qwen3_coder", CODER.format("<parameter=a>1"), "an argument of a tool call is not closed"),
    ("qwen3_coder", CODER.format("<parameter=a>1</parameter>" * 2), "the same key twice"),
    ("olmo3", "<function_calls>f(a=1)", "a tool call is not closed"),
    ("olmo3", "<function_calls>f</function_calls>", "not valid Python"),
    ("deepseek_v4", ONE_CALL["deepseek_v4"].replace(">1<", ">one<"), "a tool call is not valid JSON"),
    ("kimi_k3", ONE_CALL["kimi_k3"].replace("<|close|>call<|sep|>", ""), "an argument of a tool call is not closed"),
    ("glm", COMMAND.format("<arg_key>a</arg_key><arg_value>1"), "an argument of a tool call is not closed"),
    ("mistral", "[TOOL_CALLS]f[ARGS][1]", "is not a JSON object"),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]<s>[ARGS]{}", "id of a tool call is not a plain word"),
    ("deepseek", SECTION.format(""), "a tool call holds nothing"),
    ("deepseek", SECTION.format("f{}"), "does not begin with its tag and a name"),
    ("deepseek", ONE_CALL["deepseek"][: -len("<｜tool▁calls▁end｜>")], "a tool call is not closed"),
    ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "outside of the section"),
    ("kimi", ONE_CALL["kimi"].replace("functions.f:0", "call_1"), "is not functions.NAME:INDEX"),
    ("gemma", "<|tool_call>f{}<tool_call|>", 'does not begin with "call:"'),
    ("gemma", "<|tool_call>call:f{a:1}", "a tool call is not closed"),
    ("gemma", "<|tool_call>call:f[1]<tool_call|>", "is not an object"),
    ("harmony", "<|channel|>final", "a message does not begin with its channel"),
    ("harmony", " to=functions.f<|channel|>commentary json<|message|>{} so", "a tool call is not closed"),
    ("phi4_mini", ONE_CALL["granite"], "a tool call is not closed"),
]


@pytest.mark.parametrize(("name", "text", "problem"), BAD, ids=range(len(BAD)))
def test_bad_call_is_malformed_and_says_why(name: str, text: str, problem: str) -> None:
    reply = read(name, text)
    assert (reply.outcome, reply.message.content, reply.message.tool_calls) == ("malformed", text, ())
    assert reply.problem is not None and problem in reply.problem and len(reply.problem) <= 120
