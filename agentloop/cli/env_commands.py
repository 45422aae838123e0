"""`agentloop env check | play | demonstrate`: a report on an environment, an episode by a model, and demonstrations."""

import json
import math
import random
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from agentloop.cli.options import AsJson, Overrides, command_group
from agentloop.cli.replay.common import Force
from agentloop.config import RunConfig
from agentloop.config.config_file import is_config_file, load_config, load_plain
from agentloop.environments import EnvironmentFactory, RunEnvironments, Task, TaskSource, open_tasks
from agentloop.environments.check import respond_now, reward_now
from agentloop.environments.row_environment import agent_function
from agentloop.errors import UserError
from agentloop.rollouts.demonstrated import demonstrated
from agentloop.rollouts.episodes.episode import Episode
from agentloop.rollouts.first_prompts import RowCheck
from agentloop.rollouts.rewards import RewardScorer, open_scorer
from context.authors import LLM
from context.messages import Message, canonical_json, conversation_text, plain_message
from context.wording import visible_lines
from replay.exchange.files import replaced

_DRAWN, _DEMONSTRATED = 100, 20
"""Number of tasks that are compared with each other, and of demonstrations that are judged."""
_METHODS = (
    *("reward", "make_task", "task_from_row", "start", "tools_for", "call_tool", "respond", "close"),
    *("turn_rewards", "achieved", "demonstrate"),
)
app = command_group(
    help="Look at an environment before anything is trained on it.",
    epilog="Example: agentloop env check examples/calculator.py:Calculator",
)
Name = Annotated[
    str,
    typer.Argument(
        metavar="FILE:CLASS|CONFIG",
        help="The environment, as environment.name names it; a built-in one; or a run's YAML file, where tools and "
        "rewards are functions.",
    ),
]


@app.command(epilog="Example: agentloop env check examples/calculator.py:Calculator")
def check(environment: Name, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Try an environment without a model: its tools as a model is given them, a task, rewards, what may be missing.

    Whatever would stop a run is an error of one line, with exit code 2.
    """
    found = _check_environment(_config_of(environment, overrides))
    print(json.dumps(found) if as_json else visible_lines(_as_text(found)))


@app.command(epilog="Example: agentloop env play examples/calculator.py:Calculator --model runs/quickstart-001")
def play(
    environment: Annotated[
        str,
        typer.Argument(metavar="FILE:CLASS|CONFIG|RUN", help="The environment; a run's folder has its own."),
    ],
    model: Annotated[
        str | None,
        typer.Option(metavar="RUN|MODEL", help="Who plays: a run's newest policy, RUN:best, or a folder or id."),
    ] = None,
    overrides: Overrides = None,
    task: Annotated[int, typer.Option(min=0, metavar="NUMBER", help="Which task of the training side.")] = 0,
) -> None:
    """Let a model play one episode, and show what was said."""
    from agentloop.analysis.stored_policies import play_with

    where = None if model is None else environment
    episode, config = play_with(model or environment, where, overrides or [], task=task)
    print(conversation_text(map(plain_message, episode.messages)))
    reward = episode.environment_reward
    success = "a success" if reward >= config.rollout.success_reward else "no success"
    print(f"{episode.stop_reason}: " + ("no reward" if math.isnan(reward) else f"reward {reward:g}, {success}"))


@app.command(epilog="Example: agentloop env demonstrate examples/library.py:Library --to demonstrations.jsonl")
def demonstrate(
    environment: Name,
    to: Annotated[Path, typer.Option(metavar="FILE", help="What to write; ends in .jsonl.")],
    overrides: Overrides = None,
    tasks: Annotated[int, typer.Option(min=1, metavar="COUNT", help="How many, on the first training tasks.")] = 200,
    force: Force = False,
) -> None:
    """Write what the environment's `demonstrate` plays, with its tools, as conversations that `agentloop sft` reads."""
    from agentloop.analysis.stored_demonstrations import conversation_row

    config = _config_of(environment, overrides)
    environments, source = open_tasks(config)
    factory = environments.all[0]
    if not factory.defines("demonstrate"):
        raise UserError(
            f"{factory.where} must define demonstrate(self, task, messages, rng), got none. Write it; or take a run's "
            "successes: agentloop replay demonstrations RUN FILE"
        )
    asked, most = [source.train(index) for index in range(tasks)], config.rollout.success_reward
    hashes, successes = {*map(factory.task_hash, asked)}, 0
    with replaced(to, force=force) as target, target.open("w", encoding="utf-8") as file:
        for task, (messages, reward) in zip(asked, _demonstrations(factory, asked, config.run.seed), strict=True):
            row = conversation_row(messages, factory.tools_for(task)) | {"success": reward >= most}
            file.write(json.dumps(row) + "\n")
            successes += row["success"]
    print(f"wrote {to}: {tasks} demonstrations of {len(hashes)} different tasks, {successes} of them a success")


def _config_of(environment: str, overrides: Sequence[str] | None) -> RunConfig:
    """The configuration that CONFIG or FILE:CLASS names. Raises UserError if it has several environments."""
    if is_config_file(environment):
        config = load_config(environment, overrides or [])
    else:
        config = load_plain({"environment": {"name": environment}}, overrides or [], source="--set")
    if len(config.parts) > 1:
        raise UserError(f"CONFIG must have one environment, got {len(config.parts)}. Name one of them.")
    return config


def _check_environment(config: RunConfig) -> dict[str, Any]:
    """Facts about the environment, as JSON values. Raises UserError for faults that would stop a run."""
    environments, source = open_tasks(config)
    factory, scorer = environments.all[0], open_scorer(config, environments)
    source, remarks = _fitting_tasks(config, environments, scorer, source)
    example = source.train(0)
    drawn = [source.train(index) for index in range(_DRAWN)]
    tasks = {*map(factory.task_hash, drawn)}
    held_out = [factory.task_hash(task) for task in source.held_out(config.evaluation.tasks)]
    _try_respond(factory, example)
    shown: dict[str, Any] = {"demonstrated": None, "dialogue": []}
    if factory.defines("demonstrate"):
        shown = _demonstrate(factory, drawn[:_DEMONSTRATED], config)
    ends = ["rewards_every_end"] if factory.environment.rewards_every_end else []
    found = {
        "environment": factory.where,
        "agent": factory.agent,
        "version": factory.version,
        "tools": [*{tool["function"]["name"]: tool for task in drawn for tool in factory.tools_for(task)}.values()],
        "tools_of_example": len(factory.tools_for(example)),
        "sets_of_tools": len({canonical_json(factory.tools_for(task)) for task in drawn}),
        "methods": [*filter(factory.defines, _METHODS), *ends],
        "example": {"messages": [*map(plain_message, example.messages())], "payload": dict(example.payload)},
        "rows": source.summary,
        "different": len(tasks),
        "shared": sum(task in tasks for task in held_out),
        "empty_rewards": [_reward_empty_reply(factory, scorer, example) for _ in range(2)],
        **shown,
    }
    return {**found, "remarks": [*remarks, *_remarks(found, config)]}


def _fitting_tasks(
    config: RunConfig, environments: RunEnvironments, scorer: RewardScorer, source: TaskSource
) -> tuple[TaskSource, list[str]]:
    """Try every row as a run does at its start, and say what was left out. Raises UserError as the run would."""
    remarks: list[str] = []
    if source.summary is None:
        return source, remarks
    from agentloop.models.loading import load_files

    path, writes_prompts = config.model.path, environments.all[0].agent is not None
    files = None if path is None or writes_prompts else load_files(config, path)
    if files is None and not writes_prompts:
        remarks.append("prompts were not measured against context.max_tokens: set model.path")
    return RowCheck(config, environments, files, scorer, note=remarks.append).fitting(source), remarks


def _reward_empty_reply(factory: EnvironmentFactory, scorer: RewardScorer, task: Task) -> float:
    """The reward of an empty reply."""
    messages = (*task.messages(), Message("assistant", "", author=LLM))
    with factory.started(task) as environment:
        reward = reward_now(environment, task, messages, factory.where)
    (episode,) = scorer.score([Episode.answered(task, messages, reward)]).episodes
    return episode.environment_reward


def _try_respond(factory: EnvironmentFactory, task: Task) -> None:
    """Ask the environment once what it says to an empty reply. Raises UserError for what it may not say."""
    with factory.started(task) as environment:
        respond_now(environment, task, (*task.messages(), Message("assistant", "", author=LLM)), factory.where)


def _demonstrations(
    factory: EnvironmentFactory, tasks: Sequence[Task], seed: int
) -> Iterator[tuple[tuple[Message, ...], float]]:
    """Yield a demonstration of each task, and what the environment rewards it with."""
    rng = random.Random(seed)
    for task in tasks:
        with demonstrated(factory, task, rng) as (environment, messages):
            yield messages, reward_now(environment, task, messages, factory.where)


def _demonstrate(factory: EnvironmentFactory, tasks: Sequence[Task], config: RunConfig) -> dict[str, Any]:
    """The share of demonstrations that are a success, and the first dialogue behind its opening."""
    played = [*_demonstrations(factory, tasks, 0)]
    share = sum(reward >= config.rollout.success_reward for _, reward in played) / len(played)
    return {"demonstrated": share, "dialogue": [*map(plain_message, played[0][0][len(tasks[0].messages()) :])]}


def _remarks(found: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    if found["agent"] is not None:
        yield "the agent was not started: env play lets a model play an episode through it"
        program = shlex.split(found["agent"])[0]
        if agent_function(found["agent"]) is None and shutil.which(program) is None:
            yield f"{program} is no program of this machine: install it, or give its path"
    elif not found["tools"]:
        yield "there is no tool: the policy can only answer"
    for function in (tool["function"] for tool in found["tools"]):
        properties = function.get("parameters", {}).get("properties", {})
        silent = ", ".join(name for name, schema in properties.items() if "description" not in schema)
        if silent:
            yield f"tool {function['name']} does not say what {silent} means: write Args: in its docstring"
    if found["rows"] is None and found["different"] < _DRAWN:
        yield (
            f"of {_DRAWN} tasks {found['different']} are different, and {found['shared']} held-out ones are among them"
        )
    first, second = found["empty_rewards"]
    if first != second:
        yield f"reward is not the same for the same conversation: {first:g}, then {second:g}"
    elif first >= config.rollout.success_reward:
        yield f"an empty reply is a success already, with reward {first:g}: look at the reward"
    if not {"make_task", "demonstrate"} <= {*found["methods"]} and config.model.path is None:
        missing = "demonstrate" if "demonstrate" not in found["methods"] else "make_task, which its tasks come from"
        yield f"there is no {missing}: the built-in model can't be warmed up for it, so set model.path"
    elif found["demonstrated"] == 0:
        yield f"none of {_DEMONSTRATED} demonstrations is a success"


def _as_text(found: Mapping[str, Any]) -> str:
    example = found["example"]
    sets = ""
    if found["sets_of_tools"] > 1:
        sets = (
            f", of which this task offers {found['tools_of_example']}; {found['sets_of_tools']} sets in {_DRAWN} tasks"
        )
    own = [
        f"defines       {', '.join(found['methods'])}",
        f"tools         {len(found['tools'])}{sets}",
        *(f"  as the model is given it: {json.dumps(tool, ensure_ascii=False)}" for tool in found["tools"]),
    ]
    lines = [
        f"environment   {found['environment']}, version {found['version']}",
        *(own if found["agent"] is None else [f"agent         {found['agent']}"]),
        f"tasks         {found['rows'] or 'made up, the same for the same random numbers'}",
        *(f"  {line}" for line in conversation_text(example["messages"]).splitlines()),
        f"  payload: {json.dumps(example['payload'], ensure_ascii=False)}",
        *([f"rewards       {found['empty_rewards'][0]:g} for an empty reply"] if found["agent"] is None else []),
    ]
    if found["demonstrated"] is not None:
        lines.append(f"demonstrated  {found['demonstrated']:.0%} of demonstrations are a success")
    lines += [f"  {line}" for line in conversation_text(found["dialogue"]).splitlines()]
    return "\n".join([*lines, *([f"note: {remark}" for remark in found["remarks"]] or ["nothing is missing"])])
