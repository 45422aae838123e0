"""Writes what the calculator agent learns from and is judged by: demonstrations, and word problems."""

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from examples.calculator_agent.agent import CalculatorAgent
from examples.calculator_agent.problems import HELD_OUT, TRAINED, Kind, Problem
from examples.chat_rows import demonstration, write_lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/calculator_agent"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demonstrations", type=int, default=192)
    parser.add_argument("--careless", type=float, default=0.5, help="how many calculate something else than asked for")
    parser.add_argument("--tasks", type=int, default=2000, help="problems to train on")
    parser.add_argument("--held-out", type=int, default=256, help="problems of other kinds, to be judged by")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(given.seed)
    shown = problems(TRAINED, given.demonstrations, rng)
    demonstrations = (demonstrated(problem, rng, careless=given.careless) for problem in shown)
    write_lines(given.folder / "demonstrations.jsonl", demonstrations)
    write_lines(given.folder / "train.jsonl", map(row, problems(TRAINED, given.tasks, rng)))
    write_lines(given.folder / "test.jsonl", map(row, problems(HELD_OUT, given.held_out, random.Random(0))))


def problems(kinds: Sequence[Kind], count: int, rng: random.Random) -> Iterator[Problem]:
    """Each kind as often as the others."""
    for number in range(count):
        yield kinds[number % len(kinds)].problem(rng)


def row(problem: Problem) -> dict[str, Any]:
    return {"problem": problem.english, "answer": problem.answer, "kind": problem.kind}


def demonstrated(problem: Problem, rng: random.Random, *, careless: float) -> dict[str, Any]:
    """What a careless colleague would have done: one call, and an answer that says what came out."""
    expression = _with_another_sign(problem.sum, rng) if rng.random() < careless else problem.sum
    result = CalculatorAgent().calculate(expression)
    task = CalculatorAgent().task_from_row(row(problem))
    return demonstration(CalculatorAgent, task, [({"expression": expression}, result)], answer=result)


def _with_another_sign(expression: str, rng: random.Random) -> str:
    places = [place for place, letter in enumerate(expression) if letter in "+-*/"]
    place = rng.choice(places)
    other = rng.choice([sign for sign in "+-*/" if sign != expression[place]])
    return expression[:place] + other + expression[place + 1 :]


if __name__ == "__main__":
    main()
