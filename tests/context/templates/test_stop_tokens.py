"""Which control tokens end a reply, by what the template writes behind it."""

from __future__ import annotations

import pytest

from context.templates.chat_template import ChatTemplate
from context.templates.model_files import spelled_controls, train_tokenizer
from context.templates.stop_tokens import stop_roles
from context.tokens.codec import TokenCodec
from tests.fakes.trl_templates import model

PHI_4_MINI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.tool_calls %}{{ '<|tool_call|>' + (m.tool_calls | tojson) + '<|/tool_call|>' }}{% endif %}"
    "{{ m.content + '<|end|>' }}{% endfor %}{{ '<|assistant|>' if add_generation_prompt else '<|endoftext|>' }}"
)
ALWAYS_PROMPTED = (  # ToolACE, Command R7B: the generation prompt stands there whether it is asked for or not
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '[' + c.function.name + (c.function.arguments | tojson) + ']' }}{% endfor %}"
    "{{ '<|eot_id|>' }}{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>' }}"
)
WRAPPED = (
    "{% for m in messages %}{{ '<|START_OF_TURN|>' + m.role }}"
    "{% if m.tool_calls %}<|START_ACTION|>{{ m.tool_calls | tojson }}<|END_ACTION|>"
    "{% else %}{{ '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}{% endif %}<|END_OF_TURN|>{% endfor %}"
    "<|START_OF_TURN|>assistant"
)
GLM = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|observation|>{% else %}{{ '<|' + m.role + '|>' }}{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GEMMA_LIKE = (
    "{% for m in messages %}{{ '<|turn>' + m.role + m.content }}"
    "{% for c in m.tool_calls or [] %}<|tool_call>{{ c.function.arguments | tojson }}<tool_call|>{% endfor %}"
    "{% if m.tool_calls %}<|tool_response>{% else %}<turn|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model{% endif %}"
)


def found(source: str, *declared: str) -> dict[str, str]:
    added = list(dict.fromkeys([*spelled_controls(source), "<|user|>", "<|system|>", "<|tool|>", *declared]))
    codec = TokenCodec(train_tokenizer(source.splitlines(), added).to_str())
    ids = [token for token in map(codec.token_id, declared) if token is not None]
    assert len(ids) == len(declared)
    return {codec.decode([token]): role for token, role in stop_roles(ChatTemplate(source, {}), codec, ids).items()}


@pytest.mark.parametrize(
    ("source", "declared", "stops"),
    [
        (PHI_4_MINI, (), {"<|end|>": "answer"}),
        (PHI_4_MINI, ("<|endoftext|>",), {"<|end|>": "answer"}),
        (PHI_4_MINI, ("<|end|>", "<|endoftext|>"), {"<|end|>": "answer"}),
        (ALWAYS_PROMPTED, (), {"<|eot_id|>": "answer"}),
        (ALWAYS_PROMPTED, ("<|eot_id|>",), {"<|eot_id|>": "answer"}),
        (WRAPPED, ("<|END_OF_TURN|>",), {"<|END_OF_TURN|>": "answer"}),
        (GLM, (), {"<|user|>": "next_turn", "<|observation|>": "next_turn"}),
        (GEMMA_LIKE, (), {"<turn|>": "answer", "<|tool_response>": "tool_calls"}),
        ("{% for m in messages %}{{ m.role + m.content }}{% endfor %}", (), {}),
        ("{{ raise_exception('never') }}", (), {}),
    ],
)
def test_stops_are_the_end_of_turn_and_nothing_of_the_prompt_behind_it(
    source: str, declared: tuple[str, ...], stops: dict[str, str]
) -> None:
    assert found(source, *declared) == stops


@pytest.mark.parametrize(
    ("name", "stops"),
    [
        ("cohere2", {"<|END_OF_TURN_TOKEN|>": "answer"}),
        ("gptoss", {"<|return|>": "answer", "<|call|>": "tool_calls"}),
        ("llama3_1", {"<|eot_id|>": "answer"}),
        ("smolvlm", {"<end_of_utterance>": "answer"}),
    ],
)
def test_stops_of_real_templates(name: str, stops: dict[str, str]) -> None:
    assert found(model(name).template.source) == stops


def test_stops_of_calls_are_asked_of_the_template_for_tools() -> None:
    source = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    codec = TokenCodec(train_tokenizer([source], ["<|end|>", "<|call|>"]).to_str())
    calling = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
        "{% endfor %}{{ '<|call|>' if m.tool_calls else '<|end|>' }}{% endfor %}"
    )
    roles = stop_roles(ChatTemplate(source, {}, tool_use=calling), codec)
    assert {codec.decode([token]): role for token, role in roles.items()} == {
        "<|end|>": "answer",
        "<|call|>": "tool_calls",
    }
