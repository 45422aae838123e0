"""What the configuration says about contexts: made into parts at the start, or refused in one line."""

from __future__ import annotations

import random
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from agentloop.config import ModelSection, RunConfig
from agentloop.config.config_file import load_config
from agentloop.config.sections.context import ContextSection, make_strategy
from agentloop.environments import load_environment
from agentloop.errors import UserError
from agentloop.models.adapters import load_policy
from agentloop.models.loading import load_model
from agentloop.rollouts.actors import make_parser, stop_strings
from context import Author, ChatTemplate, HermesParser, Message
from context.strategies import STRATEGIES, ClipToolResults, Memory, SlidingWindow
from context.tokens.control import TrainingControl
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


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"loss": {"fresh": {"anchor": "behavior"}}}, "loss.fresh.anchor must be old when context.strategy is hint"),
        ({"replay": {"fraction": 0.5}}, "loss.replay.anchor must be old when context.strategy is hint"),
        (
            {"replay": {"schedule": {"shape": "linear", "final": 0.5}}},
            "loss.replay.anchor must be old when context.strategy is hint",
        ),
        ({"kl": {"reward_coef": 0.1}}, "kl.reward_coef must be 0 when context.strategy is hint"),
    ],
)
def test_hinted_rows_are_kept_from_what_needs_their_log_probs(sections: dict[str, Any], message: str) -> None:
    RunConfig.model_validate({"context": {"strategy": "hint"}})
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate({"context": {"strategy": "hint"}, **sections})


TRAINED = {"authors": [{"name": "human_edit", "action": True, "trained": True}]}
UNTRAINED = {"authors": [{"name": "subagent:planner", "action": True}]}


@pytest.mark.parametrize(
    ("context", "sections", "message"),
    [
        (
            TRAINED,
            {"loss": {"fresh": {"anchor": "behavior"}}},
            "loss.fresh.anchor must be old when context.authors has a",
        ),
        (
            TRAINED,
            {"replay": {"fraction": 0.5}},
            "loss.replay.anchor must be old when context.authors has a trained author, 'human_edit', whose log-probs "
            r"count as missing, got behavior. Set loss.replay.anchor: old, or loss.replay.missing_log_probs.",
        ),
        (TRAINED, {"kl": {"reward_coef": 0.1}}, "kl.reward_coef must be 0 when context.authors has an action author"),
        (
            UNTRAINED,
            {"kl": {"reward_coef": 0.1}},
            "kl.reward_coef must be 0 when .*'subagent:planner', whose log-probs",
        ),
    ],
)
def test_registered_speakers_are_kept_from_what_needs_their_log_probs(
    context: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    RunConfig.model_validate({"context": context, "replay": {"fraction": 0.5}, "loss": {"replay": {"anchor": "old"}}})
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate({"context": context, **sections})


def test_action_author_that_is_not_trained_needs_no_anchor() -> None:
    RunConfig.model_validate({"context": UNTRAINED, "replay": {"fraction": 0.5}})


def test_registered_speakers_have_no_log_probs() -> None:
    table = ContextSection.model_validate(TRAINED).author_table()
    assert table.author("human_edit") == Author("human_edit", action=True, trained=True, behavior=False)


def test_demonstration_is_registered_as_it_is_built_in() -> None:
    rows = [{"name": "demonstration", "action": True, "trained": True}]
    section = ContextSection.model_validate({"authors": rows})
    assert section.author_table().authors == ContextSection().author_table().authors
    assert [author.name for author in section.registered_authors()] == ["demonstration"]


def test_registered_authors_follow_the_built_in_ones() -> None:
    section = ContextSection.model_validate(
        {"authors": [{"name": "judge", "shown": False}, {"name": "subagent:planner"}]}
    )
    table = section.author_table()
    assert [author.name for author in table.authors[-2:]] == ["judge", "subagent:planner"]
    assert table.code("judge") == len(ContextSection().author_table().authors)
    assert (table.authors[-2].action, table.authors[-2].shown, table.authors[-1].shown) == (False, False, True)


def test_training_control_is_that_of_the_section() -> None:
    section = ContextSection.model_validate(
        {"keep_turns": [0, -1], "blackout": ["</think>"], "blackout_after_end": True}
    )
    assert section.training_control() == TrainingControl((0, -1), (), ("</think>",), True)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"stop_strings": ["Observation:", ""]}, "context.stop_strings must hold texts of at least one character"),
        ({"template_args": {"enable-thinking": False}}, "context.template_args must have names of variables"),
        ({"template_args": {"day": date(2026, 5, 1)}}, "context.template_args.day must be a JSON value"),
    ],
)
def test_arguments_and_stop_strings_that_do_nothing_are_refused(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        ContextSection.model_validate(values)


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


def test_parser_may_be_a_class_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from context import HermesParser\nclass Mine(HermesParser): ...\nclass Other: ...\n")
    assert isinstance(make_parser(f"{file}:Mine", ""), HermesParser)
    with pytest.raises(UserError, match=r"context.parser must have parse\(self, text, \*, stopped\)"):
        make_parser(f"{file}:Other", "")
    with pytest.raises(UserError, match="context.parser must name a class"):
        make_parser(f"{file}:Mne", "")


ASKING = """
from agentloop import Environment, Task
from context import Message

class Judged(Environment):
    def __init__(self, role: str = "assistant", author: str = "human_edit"):
        self.message = Message(role, "Yes.", author=author)

    def make_task(self, rng):
        judged = Message("user", "Do it well.", author="judge")
        return Task((Message("user", "Do it."), Message("assistant", "Done."), judged, self.message, judged))

    def reward(self, task, messages):
        return 1.0
"""
REGISTERED = (Author("judge", False, False), Author("human_edit", True, True, behavior=False))


@pytest.fixture
def judged(tmp_path: Path) -> str:
    (tmp_path / "judged.py").write_text(ASKING)
    return f"{tmp_path / 'judged.py'}:Judged"


def test_task_keeps_registered_authors(judged: str) -> None:
    task = load_environment(judged, {}, REGISTERED).make_task(random.Random(0))
    assert [message.author for message in task.messages()] == ["user", "initialization", "judge", "human_edit", "judge"]


@pytest.mark.parametrize(
    ("options", "registered", "message"),
    [
        (
            {},
            (),
            r":Judged.make_task must give messages by authors of context.authors, got 'judge' in message 2. There",
        ),
        (
            {"author": "human_edt"},
            REGISTERED,
            "got 'human_edt' in message 3. Did you mean human_edit[?] Or register it.",
        ),
        ({"author": "demonstration"}, REGISTERED, "got 'demonstration' in message 3. .* Or register it."),
        (
            {"role": "user"},
            REGISTERED,
            ":Judged.make_task must give messages by 'human_edit' the role assistant, for action: true says .*, "
            "got 'user' in message 3. Change the role, or register it with action: false.",
        ),
    ],
)
def test_task_with_a_message_nobody_can_have_written_is_told_at_the_start(
    judged: str, options: dict[str, str], registered: tuple[Author, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message) as raised:
        load_environment(judged, options, registered)
    assert "\n" not in str(raised.value)
