import pytest

from context.templates.model_files import from_template
from context.templates.template_report import check_template
from tests.fakes.real_templates import BUILT_IN, model

PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THOUGHTS = ["thinking, two user turns", "thinking, tools, then a user"]
REWRITTEN = {
    "deepseekv3": 11,  # the prompt opens a thought that history never shows
    "gemma4_v5": [THOUGHTS[0], "empty thinking between tool results", THOUGHTS[1]],
    "glm4moe": THOUGHTS,
    "gptoss": 9,  # <|return|> becomes <|end|>
    "llama3_1": [],
    "qwen3": [THOUGHTS[0], "empty thinking between tool results", THOUGHTS[1]],
    "qwen3_5_think": 7,
    **{name: [] for name in BUILT_IN},
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_real_templates_rewrite_history_when_their_text_shows_it(name: str) -> None:
    cases = check_template(model(name)).cases
    assert name not in BUILT_IN or not any(case.details for case in cases)
    found = [case.name for case in cases if case.state == "rewrites history"]
    expected = REWRITTEN[name]
    assert found == expected if isinstance(expected, list) else len(found) == expected


SHOWS_THE_LAST = "{% if m.reasoning_content and loop.last %}{{ m.reasoning_content }}{% endif %}{{ '<|im_start|>' + m"
LEFT_OUT = "message 1 (assistant): its thinking is left out"
OTHERWISE = "message 1 (assistant) or one before it: is written differently"


@pytest.mark.parametrize(
    ("source", "case", "detail"),
    [
        (PLAIN, "two user turns", None),
        (PLAIN + "{% if add_generation_prompt %}<b>\n{% endif %}", "two user turns", OTHERWISE),
        ("{{ messages | length }}" + PLAIN, "two user turns", OTHERWISE),
        (PLAIN.replace("{{ '<|im_start|>' + m", SHOWS_THE_LAST), THOUGHTS[0], LEFT_OUT),
    ],
    ids=["nothing", "prefill", "count", "thinking"],
)
def test_detail_names_the_message_and_what_becomes_of_it(source: str, case: str, detail: str | None) -> None:
    (found,) = [row for row in check_template(from_template(source)).cases if row.name == case]
    assert found.state == ("append-only" if detail is None else "rewrites history")
    assert found.details[:1] == (() if detail is None else (detail,))


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "gemma"])
def test_report_in_one_line_counts_the_cases(name: str) -> None:
    lines = {"qwen3": "rewrites history in 3 of 12 cases", "gemma": "append-only in 3 of 12 cases"}
    assert check_template(model(name)).summary() == lines.get(name, "append-only")
