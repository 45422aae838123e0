"""Real templates with every kind of tokenizer: what the policy is shown is what transformers would show it."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from tests.fakes.real_templates import PACKAGES, RealTemplate, real_template, real_templates
from tests.fakes.recorded_strategies import STRATEGIES
from tests.fakes.scripted_conversations import scripted_conversations
from tests.fakes.template_reference import Reference
from tests.fakes.tokenizer_kinds import tokenizer_kinds
from tests.real_template_table import MUST_BE_ZERO, REPRESENTATIVE, Row, all_cases, failures, rows, some_cases


@cache
def measured() -> list[Row]:
    return rows(some_cases())


def test_corpus_holds_sixty_templates_of_packages_and_no_text_twice() -> None:
    templates = real_templates()
    assert sum(template.source in PACKAGES for template in templates) >= 60
    assert max(Counter(template.text for template in templates).values()) == 1
    assert not any(template.name.endswith("_training") for template in templates)
    assert all(template.source for template in templates)


def test_cases_cover_each_template_kind_conversation_and_strategy() -> None:
    for cases in (some_cases(), all_cases()):
        assert {case.template for case in cases} == {template.name for template in real_templates()}
        assert {(case.template, case.kind) for case in cases if case.kind != "byte_bpe"} == {
            (name, kind) for name in REPRESENTATIVE for kind in tokenizer_kinds() if kind != "byte_bpe"
        }
        assert {name for case in cases for name in case.scripts} == {s.name for s in scripted_conversations()}
        assert {name for case in cases for name in case.strategies} == set(STRATEGIES)


def test_reference_reads_as_one_call_of_transformers_does() -> None:
    for kind, make in tokenizer_kinds().items():
        template: RealTemplate = real_template("trl/qwen3")
        reference = Reference(template, make(template.text))
        for script in scripted_conversations():
            text = reference.text(script.opening, script.tools)
            assert text is not None
            assert reference.ids(text) == reference.template_ids(script.opening, script.tools), kind


def test_most_conversations_are_played_to_their_end() -> None:
    counts = sum((row.counts.counted for row in measured()), Counter[str]())
    assert counts["played"] > counts["conversations"] / 2
    assert counts["prompts"] > 2 * counts["conversations"]
    assert counts["first_prompts"] > counts["conversations"]


@pytest.mark.parametrize("name", MUST_BE_ZERO)
def test_no_prompt_differs_from_transformers(name: str) -> None:
    assert [line for line in failures(measured()) if f" {name} " in line] == []
