"""Vocabularies whose control tokens are made of ordinary words and digits, and conversations in the same words."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from context import Message, ToolCall
from tests.fakes.real_templates import SPECIAL_TOKENS, RealTemplate

WORDS = [
    *("object", "string", "number", "integer", "array", "boolean", "type", "function", "name", "description"),
    *("parameters", "properties", "required", "code", "key", "value", "city", "user", "system", "assistant"),
    *("tool", "start", "end", "channel", "call", "call_id", "result", "query", "limit", "items", "enum", "control"),
    *("prefix", "suffix", "middle", "ref", "box", "time", "a", "b", "x", "yes", "no"),
]
ROLES = ("user", "system", "assistant", "tool")
_FRAME = ("<|turn|>", "<|end|>", "<|tools|>", "<|call|>", *(f"<|{role}|>" for role in ROLES))
_TOOLS = {
    "as_json": "{{ tool | tojson }}",
    "sorted": "{% for key, spec in p.properties | dictsort %} {{ key }}={{ spec.type }};{% endfor %}",
    "compared": "{% for key, spec in p.properties.items() %} {{ key }}: "
    "{{ 'Zahl' if spec.type == 'number' else 'Wort' if spec.type == 'string' else '?' }}"
    "{{ '!' if key in p.required }}{% if key == 'code' %} (roh){% endif %};{% endfor %}",
    "filtered": "{{ p.properties | list | join(', ') | upper }} {{ p.properties.keys() | sort | first | title }}"
    "{{ p.properties.values() | selectattr('type', 'equalto', 'string') | map(attribute='description') | join('; ') }}",
}
_CONTENTS = {
    "plain": "{{ m.content }}",
    "numbers": "{{ m.content if m.content.isdigit() else m.content | tojson }}",
    "begins": "{% if m.content.startswith('a') or m.content == 'x' %}* {% endif %}{{ m.content }}",
    "lower": "{{ m.content | replace('\\n\\n', '\\n') }}{% if m.content | lower != m.content %} ^{% endif %}",
}
_SOURCE = """\
{#- Control tokens: <|user|> <|system|> <|assistant|> <|tool|> #}
{%- for tool in tools or [] %}{% set p = tool.function.parameters %}<|tools|>{{ tool.function.name }} TOOL<|end|>
{% endfor %}
{%- for m in messages %}{{ HEADER + '\\n' }}
{%- for call in m.tool_calls or [] %}<|call|>{{ call.function.name }}
{%- for key, value in call.function.arguments | dictsort %} {{ key }}: {{ value }};{% endfor %}{% endfor %}
{{- '' }}CONTENT<|end|>
{% endfor %}
{%- if add_generation_prompt %}{{ ASKED + '\\n' }}{% endif %}"""
_HEADERS = {
    "whole": ("'<|turn|>' + m.role", "'<|turn|>assistant'"),
    "composed": ("'<|' + m.role + '|>'", "'<|assistant|>'"),
}


@cache
def templates() -> tuple[RealTemplate, ...]:
    """Templates that sort, compare, take attributes and filter, with headers as constants and put together."""
    return tuple(
        RealTemplate(
            f"{tool}/{content}/{name}",
            "made",
            _SOURCE.replace("HEADER", header).replace("ASKED", asked).replace("TOOL", _TOOLS[tool])
            .replace("CONTENT", _CONTENTS[content]),
            dict(SPECIAL_TOKENS),
        )
        for tool in _TOOLS
        for content in _CONTENTS
        for name, (header, asked) in _HEADERS.items()
    )  # fmt: skip


@cache
def _bytes() -> str:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return str(tokenizer.to_str())


def tokenizer_with(tokens: Sequence[str]) -> str:
    """A tokenizer.json with a token per byte, and these control tokens: the first half special, the others added."""
    tokenizer = Tokenizer.from_str(_bytes())
    half = (len(tokens) + 1) // 2
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[:half]])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens[half:]])
    return str(tokenizer.to_str())


@dataclass(frozen=True)
class Example:
    template: RealTemplate
    words: tuple[str, ...]
    """The control tokens made of words and digits."""
    tokenizer_json: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]

    def texts(self) -> Iterator[str]:
        """Every text that is not the template's: contents, names and schemas, but not roles."""
        waiting: list[Any] = [*self.tools]
        for message in self.messages:
            waiting += [message.content, message.name or "", message.tool_call_id or "", message.reasoning or ""]
            waiting += [[call.name, call.id or "", call.arguments] for call in message.tool_calls]
        while waiting:
            value = waiting.pop()
            if isinstance(value, str):
                yield value
            elif isinstance(value, dict):
                waiting += [*value, *value.values()]
            elif isinstance(value, list):
                waiting += value


def example(seed: int) -> Example:
    rng = random.Random(seed)
    words = tuple(dict.fromkeys(_token(rng) for _ in range(rng.randint(2, 12))))
    return Example(
        rng.choice(templates()),
        words,
        tokenizer_with([*SPECIAL_TOKENS.values(), *_FRAME, *words]),
        _messages(rng),
        (_tool(rng),),
    )


def _token(rng: random.Random) -> str:
    word, other, number = rng.choice(WORDS), rng.choice(WORDS), rng.randint(0, 120)
    forms = (f"[{word}_{number}]", f"<|{word}_{other}|>", f"<|{word}|>", f"<{word}>", f"{word}{number}", f"{number:02}")
    found = rng.choice((*forms, f"{word}_{other}", word.upper(), word))
    return found if len(found) > 1 else f"<{found}>"


def _text(rng: random.Random) -> str:
    return rng.choice(
        (
            str(rng.randint(0, 120)),
            rng.choice(WORDS),
            " ".join(rng.choices(WORDS, k=rng.randint(2, 8))),
            json.dumps({rng.choice(WORDS): rng.randint(0, 120)}),
            f"The {rng.choice(WORDS)}\n\nis {rng.randint(0, 120)}.",
        )
    )


def _tool(rng: random.Random) -> dict[str, Any]:
    keys = dict.fromkeys(["code", "key", *rng.sample(WORDS, k=rng.randint(0, 5))])
    kinds = ("string", "number", "object", "array", "integer")
    properties = {key: {"type": rng.choice(kinds), "description": _text(rng)} for key in keys}
    parameters = {"type": "object", "properties": properties, "required": ["key"]}
    function = {"name": "lookup", "description": _text(rng), "parameters": parameters}
    return {"type": "function", "function": function}


def _messages(rng: random.Random) -> tuple[Message, ...]:
    arguments = {key: _text(rng) for key in rng.sample(WORDS, k=rng.randint(1, 4))}
    return (
        Message("system", _text(rng), "initialization"),
        Message("user", _text(rng)),
        Message("assistant", rng.choice(("", _text(rng))), "initialization", (ToolCall("lookup", arguments),)),
        Message("tool", _text(rng), "env", name="lookup"),
        Message("assistant", _text(rng), "initialization"),
        Message("user", _text(rng)),
    )
