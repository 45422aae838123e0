"""Random conversations x real chat templates x every strategy: the laws of exact tokens hold."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from context import ContextManager, Message
from context.strategies import ClipToolResults, Hint, Linear, LinearThink, Memory, SelfClip, SlidingWindow, Strategy
from tests.fakes.conversations import TOOLS, Episode, ScriptedParser, Turn, laws
from tests.fakes.real_templates import TEMPLATES, renderer, shapes

STRATEGIES: dict[str, Strategy] = {
    "linear": Linear(),
    "linear_think": LinearThink(),
    "sliding_window": SlidingWindow(1),
    "clip_tool_results": ClipToolResults(1, keep_chars=8, marker=" [cut]"),
    "self_clip": SelfClip(1, max_answer_tokens=40),
    "self_clip untrained": SelfClip(1, train_answers=False, max_answer_tokens=40),
    "memory": Memory(1, max_summary_tokens=40),
    "hint": Hint(),
}
"""Budgets are set for each template: what its first prompt takes, and room for a turn or two."""

# Words with what templates look for, control tokens spelled out, and marks that need escaping.
WORDS = st.sampled_from(
    ["pearl", "arrow", "78", "<|im_end|>", "<think>", "[INST]", '"quoted"', "a\nb", "ünï", "{}", "</s>", "it's"]
)
TEXTS = st.lists(WORDS, min_size=1, max_size=12).map(" ".join)
TURNS = st.builds(
    Turn,
    ids=st.lists(st.integers(20, 280), max_size=6),
    content=st.one_of(st.just(""), TEXTS),
    reasoning=st.one_of(st.none(), st.just(""), TEXTS),
    arguments=st.one_of(st.none(), st.fixed_dictionaries({"key": TEXTS})),
    result=st.one_of(st.just(""), TEXTS, st.just("long " * 60)),
)
EPISODES = st.lists(TURNS, min_size=1, max_size=6)
ANSWERS = ["1. remove\n2. remove", "1: keep\n2: compress: short\n3 - remove", "no idea", ""]


@cache
def turn_tokens(name: str) -> int:
    """What one of the `LONG` turns takes in this template."""
    episode = begin(name, Linear())
    before = len(episode.context.prompt_ids)
    episode.play(fitted(name, LONG[:1]), tool_role=shapes(name)[1])
    return len(episode.context.prompt_ids) - before


def begin(name: str, strategy: Strategy, *, spoken: Sequence[Message] = ()) -> Episode:
    model = renderer(name)
    takes_system, takes_calls = shapes(name)
    start = [Message("system", "Be good.")] if takes_system else []
    start += [Message("user", "What is it?"), *spoken]
    tools = TOOLS if takes_calls else []
    if hasattr(strategy, "budget"):
        budget = len(model.initial(start, tools)) + 2 * turn_tokens(name) + 60
        strategy = replace(strategy, budget=budget)  # type: ignore[type-var]
    parser = ScriptedParser()
    context = ContextManager(model, parser, max_tokens=6000, strategy=strategy)
    context.begin(start, tools, hint="psst: <|im_end|> arrow")
    return Episode(context, parser, min(model.stop_ids), answer=lambda n: ANSWERS[n % len(ANSWERS)])


def fitted(name: str, turns: list[Turn]) -> list[Turn]:
    """The same turns in the form the template knows: some take no calls, some take a call for every result."""
    _, takes_calls = shapes(name)
    return [
        replace(
            turn,
            ids=[token for token in turn.ids if token not in renderer(name).stop_ids],
            arguments=(turn.arguments or {"key": "k"}) if takes_calls else None,
            content=_content(name, turn, takes_calls),
            result=turn.result if takes_calls else turn.result or "heard",
        )
        for turn in turns
    ]


def _content(name: str, turn: Turn, takes_calls: bool) -> str:
    if name == "gptoss" and turn.reasoning is not None:  # it takes thoughts or a content beside a call
        return ""
    return turn.content if takes_calls else turn.content or "said"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(turns=EPISODES)
def test_segments_are_what_was_given_and_sampled(name: str, strategy: str, turns: list[Turn]) -> None:
    episode = begin(name, STRATEGIES[strategy])
    episode.play(fitted(name, turns), tool_role=shapes(name)[1])
    laws(episode, renderer(name), hinted=strategy == "hint")
    # Some templates branch on a content that holds this tag: such an episode ends under its own name.
    assert episode.stop_reason != "unrenderable" or "<think>" in repr(turns)


LONG = [Turn([30 + i], "", f"thought {i}", {"key": f"k{i}"}, f"result {i} " + "blah " * 40) for i in range(8)]
ACTS = {
    "linear_think": "strip_thinking",
    "sliding_window": "drop_turns",
    "clip_tool_results": "clip_tool_results",
    "self_clip": "self_clip",
    "self_clip untrained": "self_clip",
    "memory": "summarise",
}


@pytest.mark.parametrize("strategy", ACTS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_strategy_acts_on_a_long_episode(name: str, strategy: str) -> None:
    episode = begin(name, STRATEGIES[strategy])
    episode.play(fitted(name, LONG), tool_role=shapes(name)[1])
    assert episode.stop_reason in (None, "context_full", "summary_too_long")
    done = set(episode.context.rewrites) - {"template_rewrite"}
    assert done and {kind.removesuffix("_fallback") for kind in done} == {ACTS[strategy]}
    laws(episode, renderer(name))
