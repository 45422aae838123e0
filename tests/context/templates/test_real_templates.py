"""Real templates with every kind of tokenizer: what the policy is shown is what transformers would show it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from context import AuthorTable, ChatTemplate, Renderer, default_authors
from tests.fakes.real_templates import PACKAGES, RealTemplate, real_template, real_templates
from tests.fakes.recorded_strategies import STRATEGIES
from tests.fakes.scripted_conversations import scripted_conversations
from tests.fakes.template_plays import play_all
from tests.fakes.template_reference import Reference
from tests.fakes.template_subjects import subject
from tests.fakes.tokenizer_kinds import tokenizer_kinds
from tests.real_template_table import REPRESENTATIVE, Row, all_cases, failures, rows, some_cases

AUTHORS = default_authors().authors


@cache
def measured(kind: str, source: str | None) -> tuple[Row, ...]:
    """Rows of one kind; of byte BPE, those of one source of templates."""
    templates = {template.name for template in real_templates() if source in (None, template.name.partition("/")[0])}
    return tuple(rows(case for case in some_cases() if case.kind == kind and case.template in templates))


SLICES = [
    *(("byte_bpe", source) for source in ("trl", "axolotl", "written")),
    *((kind, None) for kind in tokenizer_kinds() if kind != "byte_bpe"),
]


def test_corpus_holds_sixty_templates_of_packages_and_no_text_twice() -> None:
    templates = real_templates()
    assert sum(template.source in PACKAGES for template in templates) >= 60
    assert max(Counter(template.text for template in templates).values()) == 1
    assert not any(template.name.endswith("_training") for template in templates)
    assert all(template.source for template in templates)


def test_cases_cover_each_template_kind_conversation_and_strategy() -> None:
    for cases, least in ((some_cases(), 6), (all_cases(), 12)):
        assert {case.template for case in cases} == {template.name for template in real_templates()}
        assert {name for case in cases for name in case.scripts} == {s.name for s in scripted_conversations()}
        assert {name for case in cases for name in case.strategies} == set(STRATEGIES)
        tried = Counter(case.kind for case in cases)
        assert set(tried) == set(tokenizer_kinds()) and min(tried.values()) >= least
        assert {case.template for case in cases if case.kind != "byte_bpe"} == set(REPRESENTATIVE)


def test_reference_reads_as_one_call_of_transformers_does() -> None:
    for kind, make in tokenizer_kinds().items():
        template: RealTemplate = real_template("trl/qwen3")
        reference = Reference(template, make(template.text))
        for script in scripted_conversations():
            text = reference.text(script.opening, script.tools)
            assert text is not None
            assert reference.ids(text) == reference.template_ids(script.opening, script.tools), kind


@pytest.mark.parametrize(("kind", "source"), SLICES)
def test_prompts_are_what_transformers_writes_and_reads(kind: str, source: str | None) -> None:
    assert failures(measured(kind, source)) == []


def test_most_conversations_are_played_to_their_end() -> None:
    counts = sum((row.counts.counted for piece in SLICES for row in measured(*piece)), Counter[str]())
    assert counts["played"] > counts["conversations"] / 2
    assert counts["prompts"] > 2 * counts["conversations"]
    assert counts["first_prompts"] > counts["conversations"]
    assert counts["compared_by_parts"] > counts["conversations"] / 2


def counted(renderer_of: str, reference_of: str, script: str) -> Counter[str]:
    """What the table says of a renderer that has another template than it should."""
    made = [subject(RealTemplate("made", "here", text), "byte_bpe") for text in (renderer_of, reference_of)]
    mixed = replace(made[0], reference=made[1].reference)
    chosen = [found for found in scripted_conversations() if found.name == script]
    return play_all(mixed, chosen, ("linear",)).counted


def test_table_sees_what_is_wrong() -> None:
    drops = real_template("written/drops_thoughts").text
    keeps = drops.replace("m.reasoning_content and loop.last", "m.reasoning_content")
    other = drops.replace("\\n' + (tools", "\\n ' + (tools")
    assert len({drops, keeps, other}) == 3
    rewrites = counted(drops, keeps, "thinking")
    assert rewrites["needless_splits"] > 0 and rewrites["wrong_text"] > 0 and rewrites["first_unequal"] > 0
    assert counted(keeps, drops, "thinking")["wrong_text"] > 0
    assert counted(other, drops, "tools")["wrong_text"] > 0
    assert counted(real_template("written/llama_2").text, drops, "tools")["refused"] == 1
    assert counted(drops, drops, "thinking")["needless_splits"] == 0


def test_table_sees_sampled_tokens_that_are_not_trained() -> None:
    made = subject(real_template("axolotl/chatml"), "byte_bpe")
    untrained = [replace(author, trained=False) if author.name == "llm" else author for author in AUTHORS]
    renderer = Renderer(
        made.renderer.codec,
        ChatTemplate(made.template.text, made.template.special_tokens),
        authors=AuthorTable(untrained),
        stop_ids=made.renderer.stop_ids,
    )
    counts = play_all(replace(made, renderer=renderer), scripted_conversations()[:1], ("linear",))
    assert counts.counted["not_trained_once"] == 1
