"""`agentloop env check | play`: what an environment is like, and an episode by hand or by a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from agentloop.cli.env.environment_check import EnvironmentCheck, check_environment, opened
from agentloop.cli.env.play_by_hand import play_by_hand
from agentloop.cli.env.tool_text import tool_lines
from agentloop.cli.main import AsJson, Overrides
from agentloop.config import RunConfig
from agentloop.config.config_file import is_config_file, load_config, load_plain
from context.conversation_text import conversation_text
from context.messages import plain_message
from context.visible import visible_lines

app = typer.Typer(
    help="Look at an environment before anything is trained on it.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
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
    found = check_environment(_config(environment, overrides or []))
    print(json.dumps(found.to_json()) if as_json else visible_lines(_as_text(found)))


@app.command(epilog="Example: agentloop env play examples/calculator.py:Calculator --model runs/quickstart-001")
def play(
    environment: Name,
    overrides: Overrides = None,
    task: Annotated[int, typer.Option(min=0, metavar="NUMBER", help="Which task of the training side.")] = 0,
    model: Annotated[
        str | None,
        typer.Option(metavar="RUN|MODEL", help="Let the newest policy of a run, or a model's folder or id, play."),
    ] = None,
) -> None:
    """Play one episode: type `/tool argument=value` to call a tool, and the answer without a `/`.

    `//` begins an answer that begins with `/`. The end of the input (Ctrl-D) leaves the episode.
    """
    if model is not None:
        from agentloop.analysis.played_episode import play_with

        episode, config = play_with(model, environment, overrides or [], task=task)
        print(conversation_text(map(plain_message, episode.messages)))
        _say_end(episode.stop_reason, episode.environment_reward, config)
        return
    config = _config(environment, overrides or [])
    factory, source, scorer = opened(config)
    for line in tool_lines(factory.tools):
        print(visible_lines(line))
    reward = play_by_hand(factory, source.train(task), config, scorer, show=print, ask=_typed)
    _say_end("answered" if reward is not None else "left", reward, config)


def _config(environment: str, overrides: list[str]) -> RunConfig:
    if is_config_file(environment):
        return load_config(Path(environment), overrides)
    return load_plain({"environment": {"name": environment}}, overrides, source="--set")


def _typed() -> str | None:
    try:
        return input("> ")
    except EOFError:
        print()
        return None


def _say_end(stop_reason: str, reward: float | None, config: RunConfig) -> None:
    if reward is None:
        print(f"{stop_reason}: no reward")
        return
    success = "a success" if reward >= config.rollout.success_reward else "no success"
    print(f"{stop_reason}: reward {reward:g}, {success}")


def _as_text(found: EnvironmentCheck) -> str:
    first, _ = found.empty_rewards
    lines = [
        f"environment   {found.environment}, version {found.version}",
        f"defines       {', '.join(('reward', *found.methods))}",
        f"tools         {len(found.tools)}",
        *(f"  {line}" for line in tool_lines(found.tools)),
        *(f"  as the model is given it: {json.dumps(tool, ensure_ascii=False)}" for tool in found.tools),
        f"tasks         {found.rows or 'made up, the same for the same random numbers'}",
        *(f"  {line}" for line in conversation_text(map(plain_message, found.example.messages())).splitlines()),
        f"  payload: {json.dumps(dict(found.example.payload), ensure_ascii=False)}",
        f"rewards       {first:g} for an empty reply",
    ]
    if found.demonstrated is not None:
        lines.append(f"demonstrated  {found.demonstrated:.0%} of demonstrations are a success")
    remarks = list(found.remarks())
    return "\n".join(
        [*lines, *(f"note: {remark}" for remark in remarks)] if remarks else [*lines, "nothing is missing"]
    )
