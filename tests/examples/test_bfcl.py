"""BFCL's rows are played in our episodes and judged by BFCL's own checkers, each episode in a world of its own."""

import ast
import json
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest

from agentloop import ToolCall
from agentloop.environments import load_environment
from agentloop.rollouts.episodes.episode import Episode
from agentloop.rollouts.episodes.run_episodes import run_episodes
from examples.benchmarks.bfcl_rows import CATEGORIES, DIALOGUES, known_calls, read_rows
from tests.fakes.batch_rows import run_config
from tests.fakes.runs import ROOT
from tests.fakes.scripted import call, scripted_actors

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("bfcl_eval") is None, reason="bfcl-eval is not installed"),
]


def play(rows: Sequence[dict[str, Any]], scripts: Sequence[Sequence[str]]) -> list[Episode]:
    """Play rows of one kind, each by its script."""
    dialogues = rows[0]["category"] in DIALOGUES
    name = f"{ROOT}/examples/benchmarks/bfcl.py:{'MultiTurn' if dialogues else 'SingleTurn'}"
    factory = load_environment(name, {}, row=rows[0])
    turns = {"max_turns": 60 if dialogues else 1, "max_tokens_per_turn": 10_000, "parallel": 8}
    config = run_config(rollout=turns, context={"max_tokens": 1_000_000})
    tasks = [factory.task_from_row(row, row["id"]) for row in rows]
    return list(run_episodes(scripted_actors(factory, scripts, concurrent=True), tasks, config))


def said(calls: Sequence[ToolCall]) -> str:
    return "\n".join(call(each.name, json.dumps(each.arguments)) for each in calls)


def known(row: dict[str, Any]) -> list[str]:
    """The replies that give BFCL's known answer."""
    if "ground_truth" not in row:
        return ["None of these functions helps."]
    if row["category"] not in DIALOGUES:
        return [said(known_calls(row))]
    return [reply for turn in row["ground_truth"] for reply in [*filter(None, [said(calls_in(row, turn))]), "Done."]]


def calls_in(row: dict[str, Any], turn: Sequence[str]) -> list[ToolCall]:
    """The calls of a turn, which BFCL writes as Python."""
    functions = [*row["function"], *(each for later in row.get("missed_function", {}).values() for each in later)]
    names = {function["name"]: list(function["parameters"]["properties"]) for function in functions}
    found = []
    for text in turn:
        made = ast.parse(text, mode="eval").body
        arguments = dict(zip(names[made.func.id], made.args, strict=False))
        arguments |= {keyword.arg: keyword.value for keyword in made.keywords}
        found.append(ToolCall(made.func.id, {name: ast.literal_eval(value) for name, value in arguments.items()}))
    return found
