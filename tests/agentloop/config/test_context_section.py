"""What the configuration says about contexts: made into parts at the start, or refused in one line."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from agentloop.config import ModelSection, RunConfig
from agentloop.config.config_file import load_config
from agentloop.config.sections.context import ContextSection, make_strategy
from agentloop.environments import load_environment
from agentloop.errors import UserError
from agentloop.models.adapters import load_policy
from agentloop.models.loading import load_model
from agentloop.rollouts.actors import stop_strings
from context import Author, ChatTemplate
from context.strategies import STRATEGIES, ClipToolResults, Memory, SlidingWindow
from tests.fakes.runs import ROOT, STRATEGY_OPTIONS, save_qwen2


def refusal(tmp_path: Path, text: str) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as raised:
        load_config(path)
    message = str(raised.value)
    assert "\n" not in message
    return message.removeprefix(f"{tmp_path}/")


def test_strategies_of_the_configuration_are_those_there_are() -> None:
    assert get_args(ContextSection.model_fields["strategy"].annotation) == tuple(STRATEGIES)


@pytest.mark.parametrize("strategy", STRATEGY_OPTIONS)
def test_shipped_configuration_takes_every_strategy_as_it_says(strategy: str) -> None:
    file = ROOT / "configs" / "strategies.yaml"
    options = STRATEGY_OPTIONS[strategy][0]
    settings = [f"context.strategy={strategy}", f"context.options={options}"]
    assert load_config(file, settings).context.strategy == strategy
    said = [line for line in file.read_text().splitlines() if f"strategy={strategy}" in line]
    assert said
    assert options == "{}" or any(options in line or options.strip("{}").replace(": ", "=") in line for line in said)


def test_strategy_is_made_with_its_options() -> None:
    assert make_strategy("sliding_window", {"budget": 300}) == SlidingWindow(300)
    assert make_strategy("clip_tool_results", {"budget": 300, "order": "largest"}) == ClipToolResults(300, "largest")
    assert make_strategy("memory", {"budget": 9, "train_answers": False}) == Memory(9, train_answers=False)


@pytest.mark.parametrize(
    ("context", "line", "message"),
    [
        (
            "strategy: memory\n  options: {budgt: 3}",
            3,
            "context.options must be options of strategy memory, got 'budgt'. Did you mean budget?",
        ),
        ("strategy: linear\n  options: {budget: 3}", 3, "got 'budget'. There is none."),
        ("strategy: sliding_window", 1, "context.options must give 'budget', which strategy sliding_window needs"),
        (
            "strategy: sliding_window\n  options: {budget: 1.5}",
            3,
            "context.options.budget must be a valid integer, got 1.5.",
        ),
        (
            "strategy: sliding_window\n  options: {budget: 0}",
            3,
            "context.options.budget must be at least 1 token, got 0",
        ),
        (
            "strategy: clip_tool_results\n  options: {budget: 9, order: newest}",
            3,
            "context.options.order must be 'oldest' or 'largest', got 'newest'.",
        ),
        ("strategy: slidingwindow", 2, "context.strategy must be linear, linear_think, sliding_window, "),
        (
            "parser: hermess",
            2,
            "context.parser must be a built-in parser or path/to/file.py:ClassName, got 'hermess'. ",
        ),
        ("authors: [{name: llm}]", 2, "context.authors must have names of their own, got 'llm' twice."),
        ("authors: [{name: judge, trained: true}]", 2, "context.authors.judge must be an action author for trained"),
        (
            "authors: [{name: demonstration, action: true}]",
            2,
            "context.authors must have names of their own, got 'demonstration' twice.",
        ),
        (
            "authors: [{name: judge, action: true, shown: false}]",
            2,
            "context.authors must show an author with action: true, got shown: false for 'judge'.",
        ),
        ("authors: [{name: judge, traned: true}]", 2, "context.authors must be a list of mappings, got"),
        ("blackout: ['']", 2, "context.blackout must hold texts of at least one character"),
    ],
)
def test_context_that_can_not_be_made_is_refused_at_its_line(
    tmp_path: Path, context: str, line: int, message: str
) -> None:
    found = refusal(tmp_path, f"context:\n  {context}\n")
    assert found.startswith(f"run.yaml:{line}: ")
    assert message in found


TRAINED = {"authors": [{"name": "human_edit", "action": True, "trained": True}]}


def test_registered_authors_follow_the_built_in_ones() -> None:
    section = ContextSection.model_validate(
        {"authors": [{"name": "judge", "shown": False}, {"name": "subagent:planner"}]}
    )
    table = section.author_table()
    assert [author.name for author in table.authors[-2:]] == ["judge", "subagent:planner"]
    assert table.code("judge") == len(ContextSection().author_table().authors)
    assert (table.authors[-2].action, table.authors[-2].shown, table.authors[-1].shown) == (False, False, True)


def test_stop_strings_are_those_of_the_parser_unless_they_are_named(tmp_path: Path) -> None:
    loaded: Any = SimpleNamespace(template=ChatTemplate("<tool_call>", {}))
    for section, expected in (
        ({"parser": "hermes"}, ()),
        ({"parser": "react"}, ("Observation:",)),
        ({"parser": "react", "stop_strings": []}, ()),
        ({"stop_strings": ["END"]}, ("END",)),
    ):
        assert stop_strings(RunConfig.model_validate({"context": section}), loaded) == expected


def test_arguments_reach_the_template_of_the_loaded_model(tmp_path: Path) -> None:
    folder = save_qwen2(tmp_path)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{{ mood }}")
    values = {"model": {"path": str(folder)}, "context": {"template_args": {"mood": "calm"}}}
    loaded = load_policy(RunConfig.model_validate(values), folder)
    assert loaded.template.render([{"role": "user", "content": "x"}], generation_prompt=True).endswith("calm")
    assert loaded.fingerprint["template"] != load_model(ModelSection(), folder).fingerprint["template"]


ASKING = """
from agentloop import Environment, Task
from context import Message

class Judged(Environment):
    def __init__(self, role: str = "assistant", author: str = "human_edit"):
        self.message = Message(role, "Yes.", author=author)

    def make_task(self, rng):
        return Task((Message("user", "Do it."), Message("user", "Well.", author="judge"), self.message))

    def reward(self, task, messages):
        return 1.0
"""
REGISTERED = (Author("judge", False, False), Author("human_edit", True, True, behavior=False))


@pytest.mark.parametrize(
    ("options", "registered", "refused"),
    [
        ({}, REGISTERED, None),
        ({}, (), ":Judged.make_task must give messages by authors of context.authors, got 'judge' in message 1. There"),
        ({"author": "human_edt"}, REGISTERED, "got 'human_edt' in message 2. Did you mean human_edit[?]"),
        (
            {"role": "user"},
            REGISTERED,
            "by 'human_edit' the role assistant, for action: true .*, got 'user'",
        ),
    ],
)
def test_task_has_messages_of_registered_authors_or_is_refused_at_the_start(
    tmp_path: Path, options: dict[str, str], registered: tuple[Author, ...], refused: str | None
) -> None:
    (tmp_path / "judged.py").write_text(ASKING)
    name = f"{tmp_path / 'judged.py'}:Judged"
    if refused is None:
        task = load_environment(name, options, registered).make_task(random.Random(0))
        assert [message.author for message in task.messages()] == ["user", "judge", "human_edit"]
    else:
        with pytest.raises(UserError, match=refused):
            load_environment(name, options, registered)
