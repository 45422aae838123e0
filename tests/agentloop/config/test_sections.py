"""What single sections of the configuration mean: contexts, losses, and the composition of batches."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from agentloop.config import ModelSection, RunConfig
from agentloop.config.config_file import load_config, to_plain
from agentloop.config.sections.context import ContextSection
from agentloop.environments import load_environment
from agentloop.errors import UserError
from agentloop.models.adapters import load_policy
from agentloop.models.loading import load_model
from agentloop.rollouts.actors import stop_strings
from context import Author, ChatTemplate, Message
from context.strategies import STRATEGIES
from replay.config import StoredConfig
from replay.next_batch import as_yaml, changed
from tests.fakes.batch_rows import ragged
from tests.fakes.runs import ROOT, STRATEGY_OPTIONS, save_qwen2
from tests.fakes.tiny_actors import gradients, rescore, run_config, tiny_actor


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
    def make_task(self, rng):
        edited = Message("assistant", "Yes.", author="human_edit")
        return Task((Message("user", "Do it."), Message("user", "Well.", author="judge"), edited))

    def reward(self, task, messages):
        return 1.0
"""
REGISTERED = (Author("judge", False, False), Author("human_edit", True, True, behavior=False))


def test_task_has_messages_of_registered_authors_or_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "judged.py").write_text(ASKING)
    name = f"{tmp_path / 'judged.py'}:Judged"
    task = load_environment(name, {}, REGISTERED).make_task(random.Random(0))
    assert [message.author for message in task.messages()] == ["user", "judge", "human_edit"]
    refused = ":Judged.make_task must return messages .*open an episode, got one: author must .*, got 'judge'"
    with pytest.raises(UserError, match=refused):
        load_environment(name, {}, ())


@pytest.mark.parametrize(
    ("overrides", "objective"),
    [
        (["objective=gspo"], {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}),
        (["objective.name=gspo"], {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}),
        (["objective.name=gspo", "objective.clip_low=0.5"], {"name": "gspo", "clip_low": 0.5, "clip_high": 4e-4}),
        (["objective.clip_low=0.5"], {"name": "ppo_clip", "clip_low": 0.5, "clip_high": 0.6, "dual_clip": 3.0}),
        (["objective={name: ppo_clip}"], {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}),
    ],
)
def test_options_stay_with_their_own_objective(tmp_path: Path, overrides: list[str], objective: dict[str, Any]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("loss: {replay: {objective: {name: ppo_clip, clip_high: 0.6}}}")
    replay = load_config(path, [f"loss.replay.{override}" for override in overrides]).loss.replay
    assert replay.objective.model_dump() == objective


OWN = """
import torch
from agentloop.algorithms.objective_input import PolicyLoss

def tempered(inputs, *, power=1.0):
    return -inputs.advantages * inputs.log_ratios.exp() ** power

def flagged(inputs):
    loss = -inputs.advantages * inputs.log_ratios.exp()
    return PolicyLoss(loss, torch.ones_like(inputs.loss_mask), torch.zeros_like(inputs.loss_mask))

def summed(inputs):
    return inputs.log_probs.sum()

def broken(inputs):
    raise KeyError("weights")

def wordy(inputs):
    return "none"
"""


def own(tmp_path: Path, name: str, **options: Any) -> dict[str, Any]:
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    return {"objective": {"name": f"{path}:{name}", "options": options}}


def test_objective_of_ones_own_is_trained_with_its_options(tmp_path: Path) -> None:
    actor, old = tiny_actor(seed=0), tiny_actor(seed=1)
    scored = rescore(actor, ragged(), old=old)
    expected = gradients(actor, scored, run_config(loss={"replay": {"objective": "surrogate"}}))
    found = gradients(actor, scored, run_config(loss={"replay": own(tmp_path, "tempered")}))
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert float((found[1] - expected[1]).abs().max()) <= 1e-12 * float(expected[1].abs().max())
    halved = gradients(actor, scored, run_config(loss={"replay": own(tmp_path, "tempered", power=0.5)}))
    assert halved[0] != pytest.approx(expected[0], rel=1e-3)
    flagged = gradients(actor, scored, run_config(loss={"replay": own(tmp_path, "flagged")}))[2].metrics()
    # It says that every token is clipped: but the mask says which are tokens of it.
    assert flagged["actor/replay/pg_clipfrac"] == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("summed", r"loss.replay.objective \(summed\) must return a loss per token, .* got shape \[\]"),
        ("wordy", r"loss.replay.objective \(wordy\) must return a loss per token, .* got str"),
        ("broken", r"loss.replay.objective \(broken\) must take an ObjectiveInput .* got KeyError: 'weights'"),
        ("temperd", "loss.replay.objective must name a function of .* Did you mean tempered"),
    ],
)
def test_objective_of_ones_own_that_is_none_is_refused(tmp_path: Path, name: str, message: str) -> None:
    actor = tiny_actor()
    with pytest.raises(UserError, match=message):
        config = run_config(loss={"replay": own(tmp_path, name)})
        gradients(actor, rescore(actor, ragged(), old=actor), config)


def config(replay: dict[str, Any], *, pool: int | str = 50, **batch: int) -> RunConfig:
    sizes = {"trajectories": 32, "group_size": 8, "mini_batch": 16, **batch}
    sections = {"replay": replay, "environment": {"task_pool": pool}, "batch": sizes, "run": {"iterations": 5}}
    return RunConfig.model_validate(sections)


@pytest.mark.parametrize(
    ("schedule", "course"),
    [
        ({}, [0.4] * 5),
        ({"shape": "linear", "final": 0.0}, [0.4, 0.3, 0.2, 0.1, 0.0]),
        ({"shape": "linear", "final": 0.0, "begin": 0.5}, [0.4, 0.4, 0.4, 0.2, 0.0]),
        ({"shape": "linear", "final": 0.0, "begin": 0.25, "end": 0.75}, [0.4, 0.4, 0.2, 0.0, 0.0]),
        ({"shape": "cosine", "final": 0.8}, [0.4, 0.4586, 0.6, 0.7414, 0.8]),  # 0.6 -+ 0.2 cos 45 degrees
        ({"shape": "step", "steps": [[0.25, 0.1], [1.0, 0.9]]}, [0.4, 0.1, 0.1, 0.1, 0.9]),
    ],
)
def test_schedule_gives_each_iteration_its_share(schedule: dict[str, Any], course: list[float]) -> None:
    rule = config({"fraction": 0.4, "schedule": schedule}).mix_rule()
    assert [rule.fraction_at(iteration) for iteration in range(1, 6)] == pytest.approx(course, abs=1e-4)


def test_rule_and_limits_of_draws_are_those_of_the_configuration_also_as_it_is_stored() -> None:
    limits = config({"sources": {"self": 0.75, "teacher": 0.25}, "max_uses": 3, "successful_only": False}).replay.limits
    assert (limits.sources, limits.max_uses, limits.successful_only) == (("self", "teacher"), 3, False)
    assert config({}).replay.limits.sources is None
    own = config({"fraction": 0.5, "schedule": {"shape": "step", "steps": [[0.5, 0.1]]}, "max_staleness": 4})
    stored = StoredConfig.model_validate(to_plain(own))
    assert stored.replay == own.replay
    assert (stored.mix_rule(), stored.replay.limits) == (own.mix_rule(), own.replay.limits)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"fraction": 0.375, "sampler": "recency", "sampler_options": {"half_life": 1e-05}, "max_staleness": 8},
        {"unit": "group", "successful_only": False, "sampler": "difficulty", "sampler_options": {"sigma": 2.0}},
        {"unit": "any", "sampler": "freshness", "sampler_options": {"tau": 2.0}, "mode": "observe"},
    ],
)
def test_previewed_settings_are_a_part_of_a_configuration(tmp_path: Path, given: dict[str, Any]) -> None:
    choice = changed(StoredConfig.model_validate(to_plain(config({}))), given)
    path = tmp_path / "run.yaml"
    path.write_text(f"environment: {{task_pool: 50}}\n{as_yaml(choice.replay)}", encoding="utf-8")
    assert load_config(path).replay == choice.replay
