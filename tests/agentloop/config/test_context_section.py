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
from context import Author, ChatTemplate, Message
from context.strategies import STRATEGIES, ClipToolResults, Memory, SlidingWindow
from tests.fakes.runs import ROOT, STRATEGY_OPTIONS, save_qwen2


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
    assert loaded.template.render([Message("user", "x")], generation_prompt=True).endswith("calm")
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
