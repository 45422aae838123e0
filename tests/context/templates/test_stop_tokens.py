"""Which control tokens end a reply, by what the template writes behind it."""

from __future__ import annotations

import pytest

from context.templates.chat_template import ChatTemplate
from context.templates.model_files import spelled_controls, train_tokenizer
from context.templates.stop_tokens import stop_tokens
from context.tokens.codec import TokenCodec
from tests.fakes.real_templates import model

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
CALLING = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
    "{% endfor %}{{ '<|call|>' if m.tool_calls else '<|end|>' }}{% endfor %}"
)


def found(source: str, *declared: str, tool_use: str | None = None) -> set[str]:
    written = source + (tool_use or "")
    added = list(dict.fromkeys([*spelled_controls(written), "<|user|>", "<|system|>", "<|tool|>", *declared]))
    codec = TokenCodec(train_tokenizer(written.splitlines(), added).to_str())
    ids = [token for token in map(codec.token_id, declared) if token is not None]
    template = ChatTemplate(source, {}, tool_use=tool_use)
    return {codec.decode([token]) for token in stop_tokens(template, codec, ids)}


@pytest.mark.parametrize(
    ("source", "declared", "stops"),
    [
        (PHI_4_MINI, (), {"<|end|>"}),
        (PHI_4_MINI, ("<|endoftext|>",), {"<|end|>"}),
        (PHI_4_MINI, ("<|end|>", "<|endoftext|>"), {"<|end|>"}),
        (ALWAYS_PROMPTED, (), {"<|eot_id|>"}),
        (WRAPPED, ("<|END_OF_TURN|>",), {"<|END_OF_TURN|>"}),
        ("{% for m in messages %}{{ m.role + m.content }}{% endfor %}", (), set()),
        ("{{ raise_exception('never') }}", (), set()),
    ],
)
def test_stops_are_the_end_of_turn_and_nothing_of_the_prompt_behind_it(
    source: str, declared: tuple[str, ...], stops: set[str]
) -> None:
    assert found(source, *declared) == stops


@pytest.mark.parametrize(
    ("name", "stops"),
    [
        ("deepseekv3", {"<｜end▁of▁sentence｜>"}),
        ("gemma4_v5", {"<turn|>", "<|tool_response>"}),
        ("glm4moe", {"<|user|>", "<|observation|>"}),
        ("gptoss", {"<|return|>", "<|call|>"}),
        ("llama3_1", {"<|eot_id|>"}),
        ("phi3", {"<|end|>"}),
        ("qwen3", {"<|im_end|>"}),
        ("smolvlm", {"<end_of_utterance>"}),
    ],
)
def test_stops_of_real_templates_are_those_and_the_models_eos(name: str, stops: set[str]) -> None:
    files = model(name)
    assert {files.codec.decode([token]) for token in files.stop_ids} == stops | {"</s>"}


def test_stops_of_calls_are_asked_of_the_template_for_tools() -> None:
    plain = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    assert found(plain, tool_use=CALLING) == {"<|end|>", "<|call|>"}
