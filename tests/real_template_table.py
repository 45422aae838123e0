"""What `context` makes of real templates, counted against transformers: `python -m tests.real_template_table`.

Counts that must be 0: wrong text (a prompt that is not the template's own rendering of what is shown), needless splits
(a segment where the template only appended), refused (though transformers renders it), first prompts and parts between
control tokens whose tokens are not transformers', sampled tokens not trained exactly once, others trained.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.fakes.prompt_checks import Counts
from tests.fakes.real_templates import RealTemplate, real_template, real_templates
from tests.fakes.recorded_strategies import STRATEGIES
from tests.fakes.scripted_conversations import ScriptedConversation, scripted_conversations
from tests.fakes.template_plays import play_all
from tests.fakes.template_subjects import subject
from tests.fakes.tokenizer_kinds import tokenizer_kinds

MUST_BE_ZERO = (
    "wrong_text",
    "needless_splits",
    "refused",
    "first_unequal",
    "parts_unequal",
    "unaligned",
    "not_trained_once",
    "trained_unsampled",
)
SHOWN = ("conversations", "played", "both_refuse", "prompts", "first_prompts", *MUST_BE_ZERO, "borders", "splits")
SHOWN = (*SHOWN, "no_demonstration", "only_ours")
REPRESENTATIVE = (
    "trl/llama3_1",
    "trl/qwen3",
    "trl/deepseekv3",
    "trl/gemma4_v5",
    "trl/gptoss",
    "trl/phi3",
    "axolotl/chatml",
    "axolotl/mistral_v2v3",
    "written/mistral_v0_3",
    "written/chatglm2",
    "written/glm_4_6",
    "written/llama_2",
)
"""What every kind of tokenizer is tried with."""


@dataclass(frozen=True)
class Row:
    template: RealTemplate
    kind: str
    counts: Counts


@dataclass(frozen=True)
class Case:
    template: str
    kind: str
    scripts: tuple[str, ...]
    strategies: tuple[str, ...]


def all_cases() -> list[Case]:
    """Every template with byte BPE; every kind with the representative ones; every conversation and strategy."""
    scripts = tuple(script.name for script in scripted_conversations())
    found = [Case(template.name, "byte_bpe", scripts, STRATEGIES) for template in real_templates()]
    return found + [
        Case(name, kind, scripts, STRATEGIES)
        for kind in tokenizer_kinds()
        for name in REPRESENTATIVE
        if kind != "byte_bpe"
    ]


def some_cases() -> list[Case]:
    """A part that takes seconds: each template, each kind with half of its templates, some of all they are tried on."""
    scripts = [script.name for script in scripted_conversations()]
    kinds, others = list(tokenizer_kinds()), STRATEGIES[1:]
    found = []
    for number, case in enumerate(all_cases()):
        if case.kind == "byte_bpe":
            steps = (0, 7)
        elif (kinds.index(case.kind) + REPRESENTATIVE.index(case.template)) % 2:
            steps = (0, 6)
        else:
            continue
        chosen = tuple(scripts[(number * 5 + step) % len(scripts)] for step in steps)
        found.append(Case(case.template, case.kind, chosen, ("linear", others[number % len(others)])))
    return found


def rows(cases: Iterable[Case]) -> list[Row]:
    scripts = {script.name: script for script in scripted_conversations()}
    found = []
    for case in cases:
        template = real_template(case.template)
        chosen: list[ScriptedConversation] = [scripts[name] for name in case.scripts]
        try:
            under_test = subject(template, case.kind)
        except ValueError as error:
            counts = Counts()
            counts.add("refused", f"{template.name} {case.kind}: {error}")
        else:
            counts = play_all(under_test, chosen, case.strategies)
        found.append(Row(template, case.kind, counts))
    return found


def by_template(found: Sequence[Row]) -> list[tuple[RealTemplate, Counts]]:
    merged: dict[str, tuple[RealTemplate, Counts]] = {}
    for row in found:
        merged.setdefault(row.template.name, (row.template, Counts()))[1].update(row.counts)
    return list(merged.values())


def by_kind(found: Sequence[Row]) -> dict[str, Counts]:
    merged: dict[str, Counts] = {}
    for row in found:
        merged.setdefault(row.kind, Counts()).update(row.counts)
    return merged


def table(found: Sequence[Row]) -> str:
    lines = ["\t".join(("name", "source", *SHOWN))]
    for template, counts in by_template(found):
        lines.append("\t".join((template.name, template.source, *(str(counts.counted[name]) for name in SHOWN))))
    lines.append("\t".join(("kind", "", *SHOWN)))
    for kind, counts in by_kind(found).items():
        lines.append("\t".join((kind, "", *(str(counts.counted[name]) for name in SHOWN))))
    return "\n".join(lines)


def failures(found: Sequence[Row]) -> list[str]:
    """A line for each count that is not 0: whose, how many, and its first example."""
    return [
        f"{row.template.name} {row.kind} {name} {row.counts.counted[name]}: {row.counts.examples.get(name, '')}"
        for row in found
        for name in MUST_BE_ZERO
        if row.counts.counted[name]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--some", action="store_true", help="the part that `make test` runs")
    parser.add_argument("--template", action="append", help="only this one (again for more)")
    parser.add_argument("--examples", action="store_true", help="the first failing case of each count")
    chosen = parser.parse_args()
    cases = some_cases() if chosen.some else all_cases()
    began = time.process_time()
    found = rows(case for case in cases if not chosen.template or case.template in chosen.template)
    print(table(found))
    if chosen.examples:
        print("\n".join(failures(found)))
    print(f"{len({row.template.name for row in found})} templates, {time.process_time() - began:.0f} s CPU")
    return 1 if failures(found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
