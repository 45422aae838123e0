"""What a demonstrated reply is learned by: what transformers writes for it in its conversation, or a refusal."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from context import Message, Renderer, RenderError, ToolCall, default_authors, loss_mask
from context.messages import to_template
from context.templates.chat_template import LOOKUP
from context.templates.model_files import from_template, load_model_files
from replay.exchange.openai_chat import read_line, record_conversation
from tests.fakes.families import CHATML, family
from tests.fakes.real_templates import BUILT_IN, real_templates
from tests.fakes.template_reference import Subject, subject

AUTHORS = default_authors()
USER, MORE, SYSTEM = Message("user", "Which code?"), Message("user", "More?"), Message("system", "Be careful.")


def said(text: str, *keys: str, thought: str | None = None, first: int = 1) -> Message:
    calls = tuple(ToolCall("lookup", {"key": key}, f"call{n:05d}") for n, key in enumerate(keys, first))
    return Message("assistant", text, "demonstration", calls, reasoning=thought)


def result(number: int, text: str) -> Message:
    return Message("tool", text, "env", name="lookup", tool_call_id=f"call{number:05d}")


ANSWER = said("It is 78.")
CONVERSATIONS = {
    "plain": [USER, ANSWER],
    "call": [USER, said("", "pearl"), result(1, "78"), ANSWER],
    "parallel calls": [USER, said("", "pearl", "coral"), result(1, "78"), result(2, "79"), said("78 and 79.")],
    "text and call": [USER, said("I look it up.", "pearl"), result(1, "78"), ANSWER],
    "thought and call": [USER, said("", "pearl", thought="Look."), result(1, "78"), said("It is 78.", thought="So.")],
    "thoughts kept and dropped": [USER, said("78.", thought="Easy."), MORE, said("79.", thought="One more.")],
    "system message": [SYSTEM, USER, ANSWER, MORE, said("79.")],
    "second call": [
        *(SYSTEM, USER, said("", "pearl"), result(1, "See coral.")),
        *(said("", "coral", first=2), result(2, "78"), ANSWER),
    ],
}
RIGHT = {
    **dict.fromkeys(["trl/qwen3", "trl/gemma4_v5", "trl/nemotron_3_nano", "written/glm_4_6", *BUILT_IN], 16),
    **dict.fromkeys(["trl/gptoss", "written/hunyuan", "written/kimi_k2"], 12),
    "axolotl/gemma4": 13,
    "axolotl/command_a_tool_use": 11,
    "trl/llama3_1": 9,
    "written/mistral_v0_3": 8,
    "axolotl/falcon_h1": 7,
    "trl/deepseekv3": 4,
}
"""How many of their 16 replies are right; the others are refused."""
TEMPLATES = {row.name: row for row in real_templates()}


def replies(conversation: Sequence[Message]) -> Iterator[tuple[Sequence[Message], Message, Sequence[Message]]]:
    """Each with what is before it and behind it."""
    for place, message in enumerate(conversation):
        if message.role == "assistant":
            yield conversation[:place], message, conversation[place + 1 :] or [MORE]


def outcomes(made: Subject, conversation: list[Message]) -> Iterator[str]:
    """Whether each reply is right or refused. Fails for one that is neither."""
    tools = (LOOKUP,) if any(message.tool_calls for message in conversation) else ()
    for before, reply, after in replies(made.renderer.template.with_call_ids(conversation)):
        try:
            ids = made.renderer.reply(made.renderer.render(before, tools), reply)
        except ValueError as refused:
            assert " must " in str(refused) and " got" in str(refused)
            yield "refused"
        else:
            assert ids == made.reference.reply(before, reply, after, tools, made.renderer.stop_ids)
            yield "right"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "byte_bpe") for name in RIGHT),
        *(pytest.param(name, "byte_bpe", marks=pytest.mark.slow) for name in TEMPLATES if name not in RIGHT),
        *(pytest.param(name, kind, marks=pytest.mark.slow) for name in RIGHT for kind in ("sp_legacy", "strips")),
    ],
)
def test_demonstrated_replies_are_what_transformers_writes_or_are_refused(name: str, kind: str) -> None:
    made = subject(TEMPLATES[name], kind, allow_hidden=False)
    found = Counter(one for conversation in CONVERSATIONS.values() for one in outcomes(made, conversation))
    assert found.total() == 16
    if kind == "byte_bpe" and name in RIGHT:
        assert found["right"] == RIGHT[name]


def learned(renderer: Renderer, *messages: Message) -> list[str]:
    """What of a line of demonstrations is trained: a text for each of its replies."""
    codec, rows = renderer.codec, [to_template(message) for message in messages]
    line = json.dumps({"messages": rows, "tools": [LOOKUP]}).encode()
    found = record_conversation(read_line(line, Counter()), renderer, max_tokens=10_000)
    texts = []
    for segment in found.segments():
        ids, on = segment.tokens.token_ids, loss_mask(segment.tokens, AUTHORS)
        runs = groupby(range(len(ids)), on.__getitem__)
        texts += [codec.decode(ids[[*places]].tolist()) for kept, places in runs if kept]
    return texts


def renderer_of(name: str) -> Renderer:
    return subject(TEMPLATES[name], "byte_bpe", allow_hidden=False).renderer


def test_reply_begins_at_a_control_token_behind_a_thought_that_the_prompt_alone_holds() -> None:
    # Gemma 4's prompt ends in an empty thought, `<|channel>thought\n<channel|>`, where its reply begins `<|tool_call>`.
    assert learned(renderer_of("axolotl/gemma4"), *CONVERSATIONS["call"]) == [
        '<|tool_call>call:lookup{key:<|"|>pearl<|"|>}<tool_call|><|tool_response>',
        "It is 78.<turn|>",
    ]
    # Text that begins as the empty thought does is none of it.
    assert learned(renderer_of("axolotl/gemma4"), USER, said("<|78")) == ["<|78<turn|>"]


def test_reply_is_written_in_its_own_conversation() -> None:
    # Command A numbers calls from the beginning of the conversation.
    first, second, _ = learned(renderer_of("axolotl/command_a_tool_use"), *CONVERSATIONS["second call"])
    assert '"tool_call_id": "0"' in first and '"tool_call_id": "1"' in second


@pytest.mark.parametrize("text", ["I look it up.", "I look it up.\n", "I look it up.\n\n", " "])
def test_call_ends_with_the_header_of_its_result_whatever_text_stands_before_it(text: str) -> None:
    call, answer = learned(renderer_of("written/glm_4_6"), USER, said(text, "pearl"), result(1, "78"), ANSWER)
    assert call.endswith("</tool_call><|observation|>") and answer.endswith("It is 78.<|user|>")


SPLITTING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '<|im_end|>\n<|im_start|>assistant\n' if m.content }}<tool_call>"
    "{{ call | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# #}"
)


def test_text_that_a_template_closes_before_its_call_is_refused_and_a_call_alone_is_written_whole() -> None:
    made = from_template(SPLITTING).renderer(AUTHORS)
    asked = made.render([USER], (LOOKUP,))
    with pytest.raises(RenderError, match="must show every call, got one that leaves calls out"):
        made.reply(asked, said("I look it up.", "pearl"))
    # A call that a template writes whole has its keys in the order of OpenAI's own.
    assert made.codec.decode(made.reply(asked, said("", "pearl"))) == (
        '<tool_call>{"id": "call00001", "type": "function", "function": {"name": "lookup", "arguments": '
        '{"key": "pearl"}}}</tool_call><|im_end|>'
    )


@pytest.mark.parametrize("ids", [("call_a", "call_a"), (None, None)])
def test_calls_are_numbered_for_a_template_that_names_tools_by_their_ids(ids: tuple[str | None, str | None]) -> None:
    conversation = [
        replace(message, tool_call_id=ids[0])
        if message.role == "tool"
        else replace(message, tool_calls=tuple(replace(call, id=ids[0]) for call in message.tool_calls))
        for message in CONVERSATIONS["second call"]
    ]
    *calls, _ = learned(renderer_of("written/kimi_k2"), *conversation)
    assert [f"<|tool_call_begin|>functions.lookup:{n}<" in call for n, call in enumerate(calls)] == [True, True]


def test_model_with_named_templates_writes_replies_with_the_one_for_tools(tmp_path: Path) -> None:
    path = family("chatml").save(tmp_path)
    without_calls = CHATML.replace(".tool_calls", ".no_calls")
    rows = [{"name": "default", "template": without_calls}, {"name": "tool_use", "template": CHATML}]
    (path / "chat_template.jinja").unlink()
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": rows, "eos_token": "<|im_end|>"}))
    call, _ = learned(load_model_files(path).renderer(AUTHORS), *CONVERSATIONS["call"])
    assert call == family("chatml").call + "<|im_end|>"


def test_thought_in_an_earlier_content_stays_where_a_template_takes_none_apart() -> None:
    source = "{# </think> #}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    made = from_template(source + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}").renderer(AUTHORS)
    early = Message("assistant", "<think>\nEasy.\n</think>\n\n78.", "initialization")
    assert "<think>\nEasy.\n</think>\n\n78.<|im_end|>" in made.codec.decode(made.initial([USER, early, MORE]).token_ids)
