"""Templates' arguments, their named versions, the forms in which they take messages, and their bounds."""

from __future__ import annotations

import hashlib
import time
from datetime import datetime
from typing import Any

import pytest

from context import ChatTemplate, Message, RenderError, ToolCall
from context.templates.jinja import bounds
from tests.fakes.families import CHATML, MISTRAL
from tests.fakes.trl_templates import model

LOOKUP: dict[str, Any] = {"type": "function", "function": {"name": "lookup", "parameters": {}}}
SAYING = "{% for m in messages %}{{ m.content }}{% endfor %}"
THINKING = SAYING + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
USER = [Message("user", "x")]


def rendered(source: str, **options: Any) -> str:
    return ChatTemplate(source, {"eos_token": "</s>"}, **options).render(USER, generation_prompt=True)


def test_arguments_reach_the_template() -> None:
    assert rendered(THINKING) == "x"
    assert rendered(THINKING, args={"enable_thinking": False}) == "x<think></think>"


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
        ({"enable_thinking": object()}, "must hold JSON values"),
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


OPTIONAL_ID = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{% if c.id %}#{{ c.id }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
KIMI = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<|c|>{{ c['id'] }}{% endfor %}{% endfor %}"
)
DEMANDED = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% if c.id is not defined or c.id|length != 9 %}{{ raise_exception('ids!') }}{% endif %}{{ c.id }}"
    "{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "needs"),
    [
        (KIMI, True),
        (DEMANDED, True),
        (KIMI.replace("c['id']", "c.id|default(none)"), True),
        (OPTIONAL_ID, False),
        (CHATML, False),
        (MISTRAL, False),
        (SAYING, False),
    ],
    ids=["pasted", "demanded", "none", "optional", "chatml", "mistral", "no calls"],
)
def test_template_that_can_not_do_without_call_ids_is_found(source: str, needs: bool) -> None:
    assert ChatTemplate(source, {"bos_token": "", "eos_token": ""}).needs_call_ids is needs


def test_template_for_tools_may_be_the_one_that_needs_ids() -> None:
    assert ChatTemplate(SAYING, {}, tool_use=DEMANDED).needs_call_ids


HUGE = 10**10
BOMBS = {
    "macros that call themselves": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "blocks that call themselves": "{% block a %}{{ self.a() }}{% endblock %}",
    "product": f"{{{{ 'a' * {HUGE} }}}}",
    "product of a list": f"{{{{ {HUGE} * [1] }}}}",
    "power": "{{ 10 ** 9999999999 }}",
    "squares": "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "sums": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "texts": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "blocks": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}"
    "{% set n.x = y %}{% endfor %}",
    "hoard": "{% set n = namespace(x=[]) %}{% for i in range(999) %}{% set n.x = n.x + ['a' * 60000000] %}{% endfor %}",
    "output": "{% set b = 'a' * 60000000 %}{% for i in range(9999) %}{{ b }}{% endfor %}",
    "laughs": "{% set n = namespace(x=['a']) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "laughs as JSON": "{% set n = namespace(x=['a']) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
    "{{ n.x | tojson }}",
    "depth": "{% set n = namespace(x=[]) %}{% for i in range(90000) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x }}",
    "replace": "{{ ('a' * 999999).replace('a', 'b' * 999999) }}",
    "replace filter": "{{ ('a' * 999999) | replace('a', 'b' * 999999) }}",
    "join": "{{ ('a' * 999999).join(range(9999) | map('string')) }}",
    "join filter": "{{ range(9999) | join('a' * 999999) }}",
    "translate": "{{ ('a' * 999999).translate({97: 'b' * 999999}) }}",
    "wordwrap": "{{ ('a ' * 9999) | wordwrap(1, wrapstring='b' * 999999) }}",
    "width given": f"{{{{ '{{0:{{1}}}}'.format(1, {HUGE}) }}}}",
    "percent width given": f"{{{{ '%*d' % ({HUGE}, 1) }}}}",
    "mapped": f"{{{{ ['a'] | map('center', {HUGE}) | list }}}}",
    "by attr": f"{{{{ ('a' | attr('center'))({HUGE}) }}}}",
    "bytes": f"{{{{ 'a'.encode().center({HUGE}) }}}}",
    "tojson": f"{{{{ [1] | tojson(indent={HUGE}) }}}}",
    "round": f"{{{{ 3.5 | round({HUGE}) }}}}",
    "batch": f"{{{{ [1] | batch({HUGE}, 'x') | list }}}}",
    "slice": f"{{{{ [1] | slice({HUGE}) | list }}}}",
    "indent": f"{{{{ 'a\\nb' | indent({HUGE}) }}}}",
    "expandtabs": f"{{{{ '\\t'.expandtabs(tabsize={HUGE}) }}}}",
    "percent": f"{{{{ '%{HUGE}d' % 1 }}}}",
    "format filter": f"{{{{ '%{HUGE}d' | format(1) }}}}",
    "format": f"{{{{ '{{:{HUGE}}}'.format(1) }}}}",
    "format_map": f"{{{{ '{{a:{HUGE}}}'.format_map({{'a': 1}}) }}}}",
} | {name: f"{{{{ 'a'.{name}({HUGE}) }}}}" for name in ("center", "ljust", "rjust", "zfill")}


@pytest.mark.parametrize("name", BOMBS)
def test_template_that_takes_too_much_is_refused_in_one_line(name: str) -> None:
    began = time.monotonic()
    with pytest.raises(RenderError) as refusal:
        rendered(BOMBS[name] + SAYING)
    assert "\n" not in str(refusal.value)
    assert time.monotonic() - began < bounds.DEADLINE_SECONDS * 3


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ ([[1] * 99999] * 99999) | sum(start=[]) }}",
    ],
    ids=["loops", "loops that leave all out", "macros", "sums"],
)
def test_template_without_an_end_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(bounds, "DEADLINE_SECONDS", 0.3)
    began = time.monotonic()
    with pytest.raises(RenderError, match=r"must end within 0\.3 seconds|would have more"):
        rendered(source + SAYING)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a'.center(5) }}|{{ 'a' | center(5) }}|{{ 'a'.zfill(3) }}", "  a  |  a  |00a"),
        ("{{ 'a-b'.replace('-', '+') }}{{ 'a-b' | replace('-', '+') }}{{ 'aa' | replace('a', 'b', 1) }}", "a+ba+bba"),
        ("{{ ', '.join(['a', 'b'] | map('upper')) }}{{ [1, 2] | join('-') }}", "A, B1-2"),
        ("{{ [{'a': 1}, {'a': 2}] | sum(attribute='a') }}{{ [{'a': 1}] | join(',', attribute='a') }}", "31"),
        ("{{ '%3d|%s' % (1, 'x') }}{{ '{:>3}{a}'.format(1, a=2) }}{{ '%s' | format('y') }}", "  1|x  12y"),
        ("{{ 7 % 4 }}{{ 2 ** 3 }}{{ 2 * 3 }}{{ 'ab' * 2 }}{{ [1] + [2] }}{{ 1 ~ 'a' ~ none }}", "386abab[1, 2]1aNone"),
        ("{{ {'a': 'é<'} | tojson }}{{ [1] | tojson(indent=1) }}", '{"a": "é<"}[\n 1\n]'),
        ("{% for a in [1, 2, 3] if a != 2 %}{{ a }}{% else %}-{% endfor %}{{ 2.567 | round(1) }}", "132.6"),
        ("{{ {'items': 1}.items() | list }}{{ {'items': 1}['items'] }}", "[('items', 1)]1"),
        ("{{ {'a': 1}.b is defined }}{{ {'a': 1}.a }}{{ 'a'.__class__ is defined }}", "False1False"),
        ("{{ 'a\nb' | indent(2) }}{{ [1, 2, 3] | batch(2, 0) | list }}", "a\n  b[[1, 2], [3, 0]]"),
    ],
)
def test_what_is_within_bounds_is_jinjas_own(source: str, text: str) -> None:
    assert rendered(source + SAYING) == text + "x"


def test_a_long_conversation_is_within_bounds() -> None:
    calls = (ToolCall("lookup", {"key": "y" * 1_000}),)
    messages = [Message("user", "x" * 5_000_000)]
    for _ in range(100):
        messages += [Message("assistant", "", tool_calls=calls), Message("tool", "z" * 1_000, name="lookup")]
    text = model("qwen3").template.render(messages, tools=[LOOKUP], generation_prompt=True)
    assert text.count("y" * 1_000) == text.count("z" * 1_000) == 100
