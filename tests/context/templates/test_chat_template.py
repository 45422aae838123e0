import hashlib
from datetime import datetime
from typing import Any

import pytest

from context import ChatTemplate, RenderError
from context.templates.chat_template import LOOKUP
from tests.fakes.families import CHATML
from tests.fakes.real_templates import model

SAYING = "{% for m in messages %}{{ m.content }}{% endfor %}"
THINKING = SAYING + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
USER = [{"role": "user", "content": "x"}]


def rendered(source: str, **options: Any) -> str:
    return ChatTemplate(source, {"eos_token": "</s>"}, **options).render(USER, generation_prompt=True)


def test_argument_with_a_default_in_the_template_is_one_it_reads() -> None:
    source = "{% if not day is defined %}{% set day = 'today' %}{% endif %}{{ day }}" + SAYING
    assert (rendered(source), rendered(source, args={"day": "1 May"})) == ("todayx", "1 Mayx")
    qwen = ChatTemplate(model("qwen3").template.source, {}, args={"enable_thinking": False})
    assert qwen.render(USER, generation_prompt=True).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ({"messages": []}, "must not name what the renderer gives, got 'messages'"),
        ({"eos_token": "y"}, "must not name what the renderer gives, got 'eos_token'"),
        ({"thinking": False}, "that the chat template reads, got 'thinking'. It reads: enable_thinking."),
    ],
)
def test_argument_that_does_not_fit_is_refused(args: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RenderError, match=complaint):
        ChatTemplate(THINKING, {"eos_token": "</s>"}, args=args)


def test_hash_covers_arguments_and_the_template_for_tools_and_is_that_of_the_source_without_them() -> None:
    assert ChatTemplate(THINKING, {}).hash == hashlib.sha256(THINKING.encode()).hexdigest()
    made = [
        ChatTemplate(THINKING, {}),
        ChatTemplate(THINKING, {}, args={"enable_thinking": True}),
        ChatTemplate(THINKING, {}, args={"enable_thinking": False}),
        ChatTemplate(THINKING, {}, tool_use=SAYING),
        ChatTemplate(THINKING, {}, tool_use=THINKING),
    ]
    assert len({template.hash for template in made}) == len(made)


def test_template_for_tools_is_taken_where_there_are_tools() -> None:
    template = ChatTemplate(SAYING, {}, tool_use="tools:" + SAYING)
    assert template.render(USER, generation_prompt=True) == "x"
    assert template.render(USER, tools=[LOOKUP], generation_prompt=True) == "tools:x"


def test_today_is_that_of_the_caller() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}" + SAYING, {})
    assert template.render(USER, generation_prompt=True, now=datetime(2024, 7, 26)) == "26 Jul 2024x"
    assert template.render(USER, generation_prompt=True) == datetime.now().strftime("%d %b %Yx")


def test_contents_are_given_in_parts_to_templates_that_take_nothing_else() -> None:
    parts = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    assert rendered(parts) == "x"
    either = "{% for m in messages %}{{ 'text:' + m.content if m.content is string else 'parts' }}{% endfor %}"
    assert rendered(either) == "text:x"


CALLING = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor %}"
OPTIONAL_ID = CALLING.replace("CALL", "{% if c.id %}#{{ c.id }}{% endif %}")
KIMI = CALLING.replace("CALL", "<|c|>{{ c['id'] }}")
ONE_OF_NINE = "{% if c.id is not defined or c.id|length != 9 %}{{ raise_exception('ids!') }}{% endif %}{{ c.id }}"
DEMANDED = CALLING.replace("CALL", ONE_OF_NINE)


@pytest.mark.parametrize(
    ("source", "needs"), [(KIMI, True), (DEMANDED, True), (OPTIONAL_ID, False), (CHATML, False), (SAYING, False)]
)
def test_template_that_can_not_do_without_call_ids_is_found(source: str, needs: bool) -> None:
    assert ChatTemplate(source, {"bos_token": "", "eos_token": ""}).needs_call_ids is needs
    assert ChatTemplate(SAYING, {}, tool_use=source).needs_call_ids is needs


FAILING = {
    "is no jinja": ("{% for m in %}", "TemplateSyntaxError"),
    "says so": ("{{ raise_exception('no\nsystem <|im_end|>') }}", "TemplateError: no"),
    "macros that call themselves": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "endless range": ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError"),
    "looks behind the sandbox": ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    "changes what it is given": ("{{ messages.clear() }}", "SecurityError"),
}


@pytest.mark.parametrize(("source", "why"), FAILING.values(), ids=FAILING)
def test_template_that_can_not_render_says_why_in_one_line(source: str, why: str) -> None:
    must = r"(must render messages with the roles \[user\]|must be valid jinja2)"
    with pytest.raises(RenderError, match=f"{must}, got: {why}") as refusal:
        rendered(source + SAYING)
    assert "\n" not in str(refusal.value)


def test_template_knows_what_transformers_templates_use() -> None:
    source = (
        "{%- for m in messages -%}{%- if loop.index > 1 -%}{%- break -%}{%- endif -%}"
        "{%- generation -%}{{ {'é<': m.content} | tojson }}{{ [1] | tojson(indent=1) }}{%- endgeneration -%}"
        "{%- endfor -%}"
    )
    messages = [{"role": "user", "content": "a"}, *USER]
    assert ChatTemplate(source, {}).render(messages, generation_prompt=False) == '{"é<": "a"}[\n 1\n]'
