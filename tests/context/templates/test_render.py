from dataclasses import replace

import numpy as np
import pytest

from context import Message, RenderError, ToolCall, default_authors
from context.messages import to_template
from context.templates.rendering.contents import with_thought
from tests.fakes.conversations import ASKED, TOOLS
from tests.fakes.families import Family, families, family

CONVERSATION = (
    Message("system", "You are a careful agent.", "initialization"),
    Message("user", "What is the code of pearl?"),
    Message("assistant", "", "initialization", (ToolCall("lookup", {"key": 'pearl "x"\n'}),)),
    Message("tool", '{"next": "arrow"}', "env", name="lookup"),
    Message("assistant", "The code is 78.", "initialization"),
)


def by_author(model: Family, tokens, author: str) -> str:
    ids = tokens.token_ids[tokens.authors == default_authors().code(author)].tolist()
    return model.codec.decode(ids)


@pytest.mark.parametrize("name", families())
def test_initial_prompt_has_an_author_per_token(name: str) -> None:
    model = family(name)
    tokens = model.renderer().initial(CONVERSATION[:2], ())
    squeezed = {name: "".join(by_author(model, tokens, name).split()) for name in ("initialization", "user")}
    # "You are a careful a" is one word to Mistral's tokenizer, which begins in what the template wrote.
    said = "gent." if model.name == "mistral" else "Youareacarefulagent."
    assert squeezed == {"initialization": said, "user": "Whatisthecodeofpearl?"}
    assert np.isnan(tokens.behavior_log_probs).all() and (tokens.policy_versions == -1).all()
    # Few-shot replies are their author's too, and nobody's samples.
    tokens = model.renderer().initial(CONVERSATION, ())
    assert "he code is 78." in by_author(model, tokens, "initialization")
    assert by_author(model, tokens, "env").replace("\\", "").strip() == '{"next": "arrow"}'
    assert by_author(model, tokens, "llm") == ""


def test_conversation_keeps_the_time_it_began_at() -> None:
    source = "{{ strftime_now('%f') }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    renderer = family("chatml").renderer(source)
    before = renderer.render(ASKED, ())
    grown = renderer.render([*ASKED, Message("assistant", "hi", "llm"), Message("user", "more")], (), after=before)
    assert grown.written.text.startswith(before.written.text)
    assert renderer.render(ASKED, ()).written.text != before.written.text


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ 'A' if m.content.startswith('find') else 'B' }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ 'x' if 'find' in messages[0].content }}",
        "{% for m in messages %}{{ m.content | tojson(ensure_ascii=True) }}{% endfor %}",
    ],
)
def test_template_that_looks_at_contents_is_shown_the_real_ones(source: str) -> None:
    model = family("chatml")
    renderer = family("chatml").renderer(source)
    messages = [Message("system", "find \"it\" 'ü'", "initialization"), Message("user", "it")]
    tokens = renderer.initial(messages, ())
    expected = renderer.template.render(list(map(to_template, messages)), generation_prompt=True)
    assert model.codec.decode(tokens.token_ids.tolist()) == expected
    assert by_author(model, tokens, "user") == "it" and "find" in by_author(model, tokens, "initialization")


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "leaves out messages.0. .role sys"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "leaves out messages.0. .role sys"),
        ("{{ raise_exception('no <|im_end|> here') }}", r"no <\|im_end\|> here"),
    ],
)
def test_template_that_hides_contents_is_an_error(source: str, complaint: str) -> None:
    renderer = family("chatml").renderer(source)
    with pytest.raises(RenderError, match=complaint) as refusal:
        renderer.initial([Message("system", "find it", "initialization"), Message("user", "where")], ())
    assert str(refusal.value).encode()  # without half characters, which mark control tokens


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral"])
def test_control_tokens_in_a_demonstrated_reply_are_text_or_refused(name: str) -> None:
    model = family(name)
    renderer = model.renderer()
    asked = renderer.render([Message("user", "Which code?")], TOOLS)
    tags = [token for token in model.codec.added_tokens if token in model.call or token == "<|python_tag|>"]
    with pytest.raises(RenderError, match="must (show all of|write) a learned reply"):
        renderer.reply(asked, Message("assistant", model.call))  # a policy that says so has called a tool
    evil = "a " + " ".join(token for token in model.codec.added_tokens if token not in tags) + " b"
    ids = renderer.reply(asked, Message("assistant", evil))
    assert [token for token in ids if token in model.codec.added_ids] == [model.end_id]
    assert model.codec.decode(ids).strip() == evil + model.end


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral"])
@pytest.mark.parametrize("key", ["", " \n"])
def test_arguments_without_a_name_stand_beside_contents_that_spell_control_tokens(name: str, key: str) -> None:
    model = family(name)
    call = Message("assistant", "", tool_calls=(ToolCall("lookup", {key: "x"}, "call00001"),))
    found = Message("tool", f"a{model.end}b", name="lookup", tool_call_id="call00001")
    ids = model.renderer().initial([Message("user", "hi"), call, found]).token_ids.tolist()
    plain = replace(found, content="ab")
    without = model.renderer().initial([Message("user", "hi"), call, plain]).token_ids.tolist()
    assert ids.count(model.end_id) == without.count(model.end_id) > 0
    assert f"a{model.end}b" in model.codec.decode(ids)


@pytest.mark.parametrize(
    ("content", "reasoning", "rest"),
    [
        ("<think>\nhm\n</think>\n\nYes.", "hm", "Yes."),
        ("<think></think>Yes.", "", "Yes."),
        ("\n<think>a\nb</think>", "a\nb", ""),
        ("Yes. <think>hm</think>", None, "Yes. <think>hm</think>"),
    ],
)
def test_thinking_in_what_an_assistant_says_is_read_apart(content: str, reasoning: str | None, rest: str) -> None:
    message = with_thought(Message("assistant", content))
    assert (message.reasoning, message.content) == (reasoning, rest)
