"""Real templates with real kinds of tokenizers: what the policy is shown is what transformers would show it.

Counts that must be 0: wrong text (a prompt that is not the template's own rendering of what is shown), needless splits
(a segment where the template only appended), refused (though transformers renders it), first prompts and parts between
control tokens whose tokens are not transformers', sampled tokens not trained exactly once, others trained.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from context import AuthorTable, ChatTemplate, Renderer, default_authors
from tests.fakes.prompt_checks import Counts
from tests.fakes.real_templates import KINDS, REPRESENTATIVE, SIX, RealTemplate, real_template, real_templates
from tests.fakes.scripted_conversations import scripted_conversations
from tests.fakes.template_plays import STRATEGIES, play_all
from tests.fakes.template_reference import Reference, subject
from tests.fakes.tokenizer_kinds import tokenizer_kinds

MUST_BE_ZERO = (
    *("wrong_text", "needless_splits", "refused", "first_unequal", "parts_unequal", "unaligned"),
    *("not_trained_once", "trained_unsampled"),
)
CASES = [(name, kind) for name in SIX for kind in KINDS]
ALL_CASES = [
    *((template.name, "byte_bpe") for template in real_templates()),
    *((name, kind) for kind in tokenizer_kinds() for name in REPRESENTATIVE if kind != "byte_bpe"),
]


def failures(counts: Counts) -> list[str]:
    return [f"{name}: {counts.examples.get(name, '')}" for name in MUST_BE_ZERO if counts.counted[name]]


@cache
def played(name: str, kind: str) -> Counts:
    """Four of the conversations, each with three of the strategies: all cases together try all of them."""
    number, scripts = CASES.index((name, kind)), scripted_conversations()
    chosen = [scripts[(4 * number + step) % len(scripts)] for step in range(4)]
    others = STRATEGIES[1:]
    strategies = ("linear", others[2 * number % len(others)], others[(2 * number + 1) % len(others)])
    return play_all(subject(real_template(name), kind), chosen, strategies)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_prompts_are_what_transformers_writes_and_reads(name: str, kind: str) -> None:
    assert failures(played(name, kind)) == []


@pytest.mark.soak
@pytest.mark.parametrize(("name", "kind"), ALL_CASES)
def test_prompts_of_every_template_are_what_transformers_writes_and_reads(name: str, kind: str) -> None:
    assert failures(play_all(subject(real_template(name), kind), scripted_conversations(), STRATEGIES)) == []


def test_most_conversations_are_played_to_their_end() -> None:
    counts = sum((played(*case).counted for case in CASES), Counter[str]())
    assert counts["played"] > counts["conversations"] / 2
    assert counts["prompts"] > 2 * counts["conversations"]
    assert counts["first_prompts"] > counts["conversations"]
    assert counts["compared_by_parts"] > counts["conversations"] / 2


@pytest.mark.parametrize("kind", KINDS)
def test_reference_reads_as_one_call_of_transformers_does(kind: str) -> None:
    template = real_template("trl/qwen3")
    reference = Reference(template, tokenizer_kinds()[kind](template.text))
    for script in scripted_conversations():
        text = reference.text(script.opening, script.tools)
        assert text is not None
        assert reference.ids(text) == reference.template_ids(script.opening, script.tools)


def counted(renderer_of: str, reference_of: str, script: str) -> Counter[str]:
    """What is counted of a renderer that has another template than it should."""
    made = [subject(RealTemplate("made", "here", text), "byte_bpe") for text in (renderer_of, reference_of)]
    chosen = [found for found in scripted_conversations() if found.name == script]
    return play_all(replace(made[0], reference=made[1].reference), chosen, ("linear",)).counted


def test_counts_see_what_is_wrong() -> None:
    drops = real_template("written/drops_thoughts").text
    keeps = drops.replace("m.reasoning_content and loop.last", "m.reasoning_content")
    assert drops != keeps
    rewrites = counted(drops, keeps, "thinking")
    assert rewrites["needless_splits"] > 0 and rewrites["wrong_text"] > 0 and rewrites["first_unequal"] > 0
    assert counted(keeps, drops, "thinking")["wrong_text"] > 0
    assert counted(real_template("written/llama_2").text, drops, "tools")["refused"] == 1
    assert counted(drops, drops, "thinking")["needless_splits"] == 0


def test_counts_see_sampled_tokens_that_are_not_trained() -> None:
    made = subject(real_template("axolotl/chatml"), "byte_bpe")
    untrained = [replace(row, trained=False) if row.name == "llm" else row for row in default_authors().authors]
    renderer = Renderer(
        made.renderer.codec,
        ChatTemplate(made.template.text, made.template.special_tokens),
        authors=AuthorTable(untrained),
        stop_ids=made.renderer.stop_ids,
    )
    counts = play_all(replace(made, renderer=renderer), scripted_conversations()[:1], ("linear",))
    assert counts.counted["not_trained_once"] == 1
