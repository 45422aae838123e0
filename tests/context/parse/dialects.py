"""The dialects of tool calls, each with the template that writes it, and generated replies for all of them."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from context import ChatTemplate
from context.parse import PARSERS, ReplyParser
from tests.fakes.real_templates import model

USER = {"role": "user", "content": "What is the code of pearl?"}


@dataclass(frozen=True)
class Dialect:
    parser: str
    template: str
    """One of `real_templates`; a bare name is one of trl's."""
    ends: tuple[str, ...]
    """What the template ends a turn with."""
    parallel: int = 3
    """Most calls in one reply."""
    beside: bool = True
    """Whether text may stand beside calls."""
    thinks: bool = True
    """Whether the template writes thinking in a reply with calls."""
    ids: str | None = None
    """The form of the ids it writes; None: none."""
    plain_names: bool = False
    """Names are Python's."""
    unspeakable: tuple[str, ...] = ()
    """What no argument can hold: its own end."""

    @property
    def chat_template(self) -> ChatTemplate:
        return model(self.template).template

    def parse(self, tools: list[dict[str, Any]]) -> ReplyParser:
        return PARSERS[self.parser](tools)

    def written(self, reply: dict[str, Any]) -> str:
        """What stands behind the prompt, with what the prompt opened for the reply, without the end of the turn."""
        whole = self.chat_template.render([USER, reply], generation_prompt=False)
        prompt = _prompt(self.template)
        same = next(n for n in range(len(prompt), 0, -1) if whole.startswith(prompt[:n]))
        tag = prompt.rfind("<", 0, same)  # the templates' own prompts leave none open
        text = whole[tag if tag >= 0 and ">" not in prompt[tag:same] else same :]
        for end in self.ends:
            text = text.removesuffix(end)
        return text


COHERE_END = "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
QWEN_ENDS = ("<|im_end|>\n",)
CODER = {"parser": "qwen3_coder", "ends": QWEN_ENDS, "unspeakable": ("</function>", "<parameter=x>")}
DIALECTS = [
    Dialect("hermes", "qwen2_5", QWEN_ENDS, thinks=False),
    Dialect("hermes", "qwen3", QWEN_ENDS),
    Dialect("hermes", "built_in/hermes", QWEN_ENDS),
    Dialect("llama3_json", "llama3_1", ("<|eot_id|>",), parallel=1, beside=False, thinks=False),
    Dialect("llama3_json", "built_in/llama3", ("<|eot_id|>",)),
    Dialect("pythonic", "lfm2_v2", QWEN_ENDS, thinks=False, plain_names=True),
    Dialect("pythonic", "written/llama4_pythonic", ("<|eot|>",), beside=False, plain_names=True),
    Dialect("olmo3", "written/olmo_3", ("</s>",), thinks=False, plain_names=True),
    Dialect(template="nemotron_3_nano", **CODER),
    Dialect(template="qwen3_5_think", **CODER),
    Dialect(template="qwen3_6", **CODER),
    Dialect("glm", "glm4moe", (), unspeakable=("<arg_key>", "</tool_call>")),
    Dialect("mistral", "written/mistral_v0_3", ("</s>",), ids="{:09d}", beside=False, thinks=False),
    Dialect("mistral", "written/mistral_v11", ("</s>",), thinks=False),
    Dialect("mistral", "built_in/mistral", ("</s>",)),
    Dialect("deepseek", "deepseekv3", ("<｜end▁of▁sentence｜>",), thinks=False),
    Dialect("deepseek", "written/deepseek_v31", ("<｜end▁of▁sentence｜>",)),
    Dialect("deepseek_v4", "written/deepseek_v4", ("<｜end▁of▁sentence｜>",)),
    Dialect("kimi", "written/kimi_k2", ("<|im_end|>",), ids="functions.{name}:{}", thinks=False),
    Dialect("kimi_k3", "written/kimi_k3", ("<|close|>message<|sep|><|end_of_msg|>",)),
    Dialect("gemma", "gemma4_v5", ("<|tool_response>", "<turn|>\n"), unspeakable=('<|"|>',)),
    Dialect("harmony", "gptoss", ("<|call|>",), parallel=1, beside=False),
    Dialect("minimax", "written/minimax_m2", ("[e~[\n",), unspeakable=("</invoke>", '<parameter name="x">')),
    Dialect("phi4_mini", "written/phi_4_mini", ("<|end|></s>",), thinks=False),
    Dialect("granite", "written/granite_3", ("<|end_of_text|>\n",), beside=False, thinks=False),
    Dialect("nemotron", "written/nemotron", ("\n<SPECIAL_12>\n",)),
    Dialect("command_r", "written/command_r", ("<|END_OF_TURN_TOKEN|>",)),
    Dialect("command_a", "written/command_r7b", (COHERE_END,), ids="{}", beside=False),
    Dialect("jamba", "axolotl/jamba", ("<|eom|>",), thinks=False),
    Dialect("react", "written/react", QWEN_ENDS),
]

SECTION = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
DSML = "<｜DSML｜tool_calls>{}</｜DSML｜invoke></｜DSML｜tool_calls>"
XTML = '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>{}<|close|>call<|sep|><|close|>tools<|sep|>'
ONE_CALL = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
    "llama3_json": '{"name": "f", "parameters": {"a": 1}}',
    "pythonic": "[f(a=1)]",
    "olmo3": "<function_calls>f(a=1)</function_calls>",
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": 1}',
    "deepseek": SECTION.format('<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'),
    "kimi": KIMI.format('<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'),
    "deepseek_v4": DSML.format(
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>'
    ),
    "kimi_k3": XTML.format('<|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>'),
    "gemma": "<|tool_call>call:f{a:1}<tool_call|>",
    "harmony": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}',
    "minimax": '<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke></minimax:tool_call>',
    "phi4_mini": '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>',
    "granite": '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]',
    "nemotron": '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>',
    "command_r": 'Action: ```json\n[{"tool_name": "f", "parameters": {"a": 1}}]\n```',
    "command_a": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}]<|END_ACTION|>',
    "jamba": '<tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>',
    "react": 'Action: f\nAction Input: {"a": 1}',
}
"""f(a=1), as each dialect writes it."""


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


_TAG = re.compile(r"<[^<>{}]+>|\[[A-Z_]+\]|```|Action(?: Input)?:")
_OTHERS = ("<think>", "</think>", "[/THINK]", "<|END_THINKING|>", "<channel|>", '<|"|>', "<|im_end|>", "<|python_tag|>")
CONTROLS = [*sorted({tag for text in ONE_CALL.values() for tag in _TAG.findall(text)}), *_OTHERS]
"""Spellings of every family's own tags."""
_WORDS = ["pearl", "é", "日本", "🙂", "true", "\\n", *"\n\t\"'\\{}[],:3 <>"]


@cache
def _prompt(name: str) -> str:
    return model(name).template.render([USER], generation_prompt=True)


def drawn_reply(dialect: Dialect, chance: random.Random) -> dict[str, Any]:
    """A reply with calls: typed arguments, thinking and text where the dialect has a place for them."""
    row: dict[str, Any] = {"role": "assistant", "content": ""}
    if dialect.beside and chance.random() < 0.5:
        row["content"] = _sentence(chance)
    if dialect.thinks and chance.random() < 0.5:
        row["reasoning_content"] = _sentence(chance)
    row["tool_calls"] = [_call(dialect, chance, n) for n in range(chance.randint(1, dialect.parallel))]
    return row


def tools_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    tools = []
    for call in row["tool_calls"]:
        given = call["function"]["arguments"]
        types = {name: {"type": kinds.get(type(value), "null")} for name, value in given.items()}
        parameters = {"type": "object", "properties": types}
        tools.append({"type": "function", "function": {"name": call["function"]["name"], "parameters": parameters}})
    return tools


def _call(dialect: Dialect, chance: random.Random, index: int) -> dict[str, Any]:
    names = ["lookup", "store_put", f"f{index}"] if dialect.plain_names else ["lookup", "store.put", "mcp/a:b-c", "f"]
    name = f"{chance.choice(names)}{index}"  # each with its own types
    keys = chance.sample(["key", "n", "rows", "text", "more", "a_b"], chance.randint(0, 5))
    arguments = {key: _value(dialect, chance, 3) for key in keys}
    row: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if dialect.ids is not None:
        row["id"] = dialect.ids.format(index, name=name)
    return row


def _value(dialect: Dialect, chance: random.Random, depth: int) -> Any:
    makers: list[Callable[[], Any]] = [
        lambda: _text(dialect, chance),
        lambda: _text(dialect, chance),
        lambda: chance.choice([0, -7, 10**18, chance.randint(-999, 999)]),
        lambda: chance.choice([0.5, -1e-07, 1e300, chance.random()]),
        lambda: chance.choice([True, False, None]),
    ]
    if depth:
        makers.append(lambda: [_value(dialect, chance, depth - 1) for _ in range(chance.randint(0, 3))])
        keys = ["a", "key", "x_1"]
        makers.append(
            lambda: {k: _value(dialect, chance, depth - 1) for k in chance.sample(keys, chance.randint(0, 3))}
        )
    return chance.choice(makers)()


def _text(dialect: Dialect, chance: random.Random) -> str:
    pieces = [chance.choice(CONTROLS if chance.random() < 0.2 else _WORDS) for _ in range(chance.randint(0, 8))]
    text = "".join(pieces)
    for end in dialect.unspeakable:
        text = text.replace(end, "")
    return text


def _sentence(chance: random.Random) -> str:
    return " ".join(chance.choices(["Let", "me", "see", "é", "日本", "78.", "pearl"], k=chance.randint(1, 5)))
