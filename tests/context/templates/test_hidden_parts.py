from dataclasses import replace

import pytest

from context import Message, Renderer, RenderError, ToolCall, default_authors
from context.templates.chat_template import LOOKUP
from context.templates.model_files import from_template
from context.templates.template_report import check_template
from tests.fakes.real_templates import BUILT_IN, model, renderer

# Words of the sentence for each kind.
KINDS = {
    "system messages": ("(role system)", "roles [system, user]"),
    "tools": ("every tool",),
    "calls": ("every call",),
    "demonstrations": ("an answer: ", "a call: ", "a call beside text: "),
    "results": ("(role tool)", "roles [user, assistant, tool]"),
    "thoughts": ("every thought",),
}
LEFT_OUT = {
    "trl/llama3_1": ["thoughts", "demonstrations"],
    "trl/qwen3": [],
    "trl/deepseekv3": ["tools", "thoughts", "demonstrations"],
    "trl/gptoss": ["demonstrations"],
    "written/mistral_v0_3": ["thoughts", "demonstrations"],
    "trl/gemma": ["system messages", "tools", "calls", "results", "thoughts", "demonstrations"],
    "trl/deepseek_r1_distill": ["tools", "calls", "thoughts", "demonstrations"],
    "axolotl/chatml": ["tools", "calls", "thoughts", "demonstrations"],
    "written/llama_2": ["tools", "calls", "results", "thoughts", "demonstrations"],
    "written/r1": ["tools", "thoughts", "demonstrations"],
    **{name: [] for name in BUILT_IN},
}
CALL = ToolCall("lookup", {"key": "pearl-0417"}, "call00001")
WITHOUT_TEXTS = ToolCall("lookup", {"n": 48151}, "call00001")


def answer(made: Renderer, message: Message) -> list[int]:
    return made.reply(made.render([Message("user", "Which code?")], [LOOKUP]), message)


SPELLED = "<think>\nWhich zebra?\n</think>\n\n"


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_a_template_leaves_out_is_said_with_the_key_that_mends_it(name: str) -> None:
    report = check_template(model(name))
    hidden = {part: why for part, why in report.parts.items() if why is not None}
    assert list(hidden) == LEFT_OUT[name]
    for part, why in hidden.items():
        assert any(word in why for word in KINDS[part]) and "context.template: hermes" in why
    assert report.state != "unsupported"


def test_thought_whose_marks_would_be_plain_text_is_refused() -> None:
    # A vocabulary with a control token for it, and a template that knows none: contents never become control tokens.
    made = replace(model("trl/qwen3"), template=model("axolotl/chatml").template).renderer(default_authors())
    thought = Message("assistant", SPELLED + "78.")
    with pytest.raises(RenderError, match="must show every thought of a learned reply"):
        answer(made, thought)
    insists = replace(model("trl/qwen3"), template=model("axolotl/chatml").template)
    assert "Which zebra?" in made.codec.decode(answer(insists.renderer(default_authors(), allow_hidden=True), thought))


def test_call_whose_name_is_left_out_is_refused() -> None:
    # Kimi K2 names the tool in the call's id alone.
    made = renderer("written/kimi_k2")
    with pytest.raises(RenderError, match="the id of a tool call is not functions.NAME:INDEX"):
        answer(made, Message("assistant", "", tool_calls=(CALL,)))
    assert answer(made, Message("assistant", "", tool_calls=(ToolCall("lookup", {}, "functions.lookup:0"),)))


def test_prompt_whose_calls_have_no_texts_is_refused_where_they_would_be_left_out() -> None:
    conversation = [
        Message("user", "Which code?"),
        Message("assistant", "", "history", (WITHOUT_TEXTS,)),
        Message("tool", "78", "env", name="lookup"),
    ]
    with pytest.raises(RenderError, match=r"leaves calls out\. Set context\.template: hermes"):
        renderer("written/smollm2").initial(conversation, [LOOKUP])
    assert len(renderer("trl/qwen2_5").initial(conversation, [LOOKUP]))
    allowed = model("written/smollm2").renderer(default_authors(), allow_hidden=True)
    assert "78" in allowed.codec.decode(allowed.initial(conversation, ()).token_ids.tolist())
    assert allowed.codec.decode(answer(allowed, Message("assistant", "", tool_calls=(CALL,)))) == "<|im_end|>"


def test_thought_or_text_that_stands_elsewhere_in_the_reply_too_is_not_lost() -> None:
    thoughtless = from_template(THOUGHTLESS).renderer(default_authors())
    with pytest.raises(RenderError, match="must show every thought of a learned reply"):
        answer(thoughtless, Message("assistant", "The answer is 42.", reasoning="42"))
    textless = from_template(THOUGHTLESS.replace("m.content", "('' if m.tool_calls else m.content)"))
    with pytest.raises(RenderError, match="must show all of a learned reply"):
        answer(textless.renderer(default_authors()), Message("assistant", "lookup", tool_calls=(CALL,)))


THOUGHTLESS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
