"""BFCL's rows are played in our episodes and judged by BFCL's own checkers, each episode in a world of its own."""

import ast
import json
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from agentloop import ToolCall
from agentloop.environments import load_environment
from agentloop.rollouts.episodes.episode import Episode
from agentloop.rollouts.episodes.run_episodes import run_episodes
from examples.benchmarks.bfcl import written
from examples.benchmarks.bfcl_rows import CATEGORIES, DIALOGUES, NO_CALL, known_calls, read_rows
from tests.fakes.runs import ROOT
from tests.fakes.scripted import call, scripted_actors, shown
from tests.fakes.tiny_actors import run_config

needs_bfcl = pytest.mark.skipif(find_spec("bfcl_eval") is None, reason="bfcl-eval is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), needs_bfcl]

ROWS = dict(zip(CATEGORIES, (400, 200, 200, 200, 240, 258, 1053, 884, 200, 200, 200), strict=True))
NOT_RIGHT = {
    # BFCL's own checker refuses these: no value is accepted for a required argument, ...
    *("live_simple_106-63-0", "live_simple_112-68-0", "live_multiple_964-207-0"),
    "live_multiple_862-181-3",  # ... or the answer has an argument that the function has not.
    "multi_turn_miss_func_49",  # The answer calls `tail` before it is handed out.
}


def play(rows: Sequence[dict[str, Any]], scripts: Sequence[Sequence[str]], *, max_turns: int = 60) -> list[Episode]:
    """Play rows of one kind, each by its script."""
    dialogues = rows[0]["category"] in DIALOGUES
    name = f"{ROOT}/examples/benchmarks/bfcl.py:{'MultiTurn' if dialogues else 'SingleTurn'}"
    factory = load_environment(name, {}, row=rows[0])
    turns = {"max_turns": max_turns if dialogues else 1, "max_tokens_per_turn": 10_000, "parallel": 8}
    config = run_config(rollout=turns, context={"max_tokens": 1_000_000})
    tasks = [factory.task_from_row(row, row["id"]) for row in rows]
    return list(run_episodes(scripted_actors(factory, scripts, concurrent=True), tasks, config))


def said(calls: Sequence[ToolCall]) -> str:
    return "\n".join(call(each.name, json.dumps(each.arguments)) for each in calls)


def known(row: dict[str, Any]) -> list[str]:
    """The replies that give BFCL's known answer."""
    if "ground_truth" not in row:
        return [NO_CALL]
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


@pytest.mark.parametrize("category", ROWS)
def test_known_answers_are_judged_right(category: str) -> None:
    rows = read_rows(category)
    episodes = play(rows, [known(row) for row in rows])
    wrong = {row["id"] for row, episode in zip(rows, episodes, strict=True) if episode.environment_reward != 1}
    assert len(rows) == ROWS[category] and wrong == NOT_RIGHT & {row["id"] for row in rows}


def damaged(calls: Sequence[ToolCall], rng: random.Random) -> list[ToolCall]:
    """The calls with one lost, doubled, moved or renamed, or with another argument or value."""
    made, place = list(calls), rng.randrange(len(calls))
    name, arguments = made[place].name, dict(made[place].arguments)
    some = rng.choice(list(arguments) or ["none"])
    values = [7, 2.5, "other", True, None, ["other"], {"a": 1}, arguments.get(some)]
    changed = [ToolCall("other", arguments), ToolCall(name, {**arguments, "other": 1})]
    changed += [ToolCall(name, {**arguments, some: value}) for value in values]
    changed += [ToolCall(name, {key: value for key, value in arguments.items() if key != some})]
    whole = [made[:place] + made[place + 1 :], [*made, made[place]], made[::-1]]
    return rng.choice([*whole, *([*made[:place], other, *made[place + 1 :]] for other in changed)])


def test_damaged_answers_have_the_verdict_of_the_checker_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    models = SimpleNamespace(MODEL_CONFIG_MAPPING=defaultdict(lambda: SimpleNamespace(underscore_to_dot=False)))
    monkeypatch.setitem(sys.modules, "bfcl_eval.constants.model_config", models)
    from bfcl_eval.eval_checker.ast_eval.ast_checker import Language, ast_checker

    rng, verdicts = random.Random(0), []
    for category in ("simple_python", "multiple", "parallel", "parallel_multiple", "live_simple", "live_multiple"):
        rows = [row for row in rng.sample(read_rows(category), 42) if row["id"] not in NOT_RIGHT][:40]
        answers = [damaged(known_calls(row), rng) for row in rows]
        for row, calls, episode in zip(rows, answers, play(rows, [[said(calls)] for calls in answers]), strict=True):
            given = [{each.name: each.arguments} for each in calls]
            alone = ast_checker(row["function"], given, row["ground_truth"], Language.PYTHON, category, "alone")
            assert episode.environment_reward == alone["valid"], row["id"]
            verdicts.append(alone["valid"])
    assert len(verdicts) == 240 and 20 < sum(verdicts) < 220


@pytest.mark.parametrize("category", DIALOGUES)
def test_damaged_dialogues_have_the_verdict_of_the_checker_alone(category: str) -> None:
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

    rng, verdicts = random.Random(0), []
    rows = [row for row in rng.sample(read_rows(category), 22) if row["id"] not in NOT_RIGHT][:20]
    for row in rows:
        turn = rng.choice([turn for turn in row["ground_truth"] if turn])
        others = [text for other in row["ground_truth"] for text in other]
        row["damaged"] = [list(each) for each in row["ground_truth"]]
        row["damaged"][row["ground_truth"].index(turn)] = rng.choice(
            [turn[1:], turn[::-1], [*turn, rng.choice(others)]]
        )
    scripts = [known({**row, "ground_truth": row["damaged"]}) for row in rows]
    for row, episode in zip(rows, play(rows, scripts), strict=True):
        steps = [[[written(each) for each in calls_in(row, turn)]] if turn else [] for turn in row["damaged"]]
        alone = multi_turn_checker(steps, row["ground_truth"], row, category, "alone")["valid"]
        assert episode.environment_reward == alone, row["id"]
        verdicts.append(alone)
    assert len(verdicts) == 20 and 0 < sum(verdicts) < 20


def test_arguments_whose_names_are_code_are_never_evaluated() -> None:
    script = [call("ls", json.dumps({"a=print(1), **": {}})), "Done."]
    (episode,) = play(read_rows("multi_turn_base")[:1], [script], max_turns=2)
    assert (episode.error_kinds, shown(episode)) == (("raised",), ['{"error": "ValueError: ls has other arguments"}'])


@pytest.mark.soak
def test_two_episodes_of_a_row_never_share_a_world() -> None:
    rows = [row for row in read_rows("multi_turn_base") if "GorillaFileSystem" in row["involved_classes"]]
    pairs = [rows[number % len(rows)] for number in range(1000)]
    script = [[call("touch", f'{{"file_name": "of_{one}"}}'), call("ls"), "Done."] for one in ("one", "other")]
    episodes = play([row for row in pairs for _ in script], script * 1000, max_turns=3)
    for one, other in zip(episodes[::2], episodes[1::2], strict=True):
        assert ["of_one" in shown(one)[1], "of_other" in shown(one)[1]] == [True, False]
        assert ["of_one" in shown(other)[1], "of_other" in shown(other)[1]] == [False, True]
