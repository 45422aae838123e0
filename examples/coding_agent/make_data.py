"""Writes what the coding agent learns from and is judged by: demonstrations, and problems with hidden tests."""

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from examples.chat_rows import Call, demonstration, or_other, write_lines
from examples.coding_agent.agent import DONE, CodingAgent, verdict
from examples.coding_agent.problems import CHANGED, COMBINED, HELD_OUT, KEPT, TRAINED, Problem, Template

TRIES_AGAIN = 0.5
"""How often a demonstration tries again where the example told that it was wrong."""
MOST_TRIES = 3
HELD_OUT_PROBLEMS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/coding_agent"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demonstrations", type=int, default=4000)
    parser.add_argument("--tasks", type=int, default=2000, help="problems to train on")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(given.seed)
    posed = problems(TRAINED, given.demonstrations, rng)
    write_lines(given.folder / "demonstrations.jsonl", (demonstrated(problem, row, rng) for problem, row in posed))
    write_lines(given.folder / "train.jsonl", (row for _, row in problems(TRAINED, given.tasks, rng)))
    write_lines(given.folder / "test.jsonl", (row for _, row in problems(HELD_OUT, HELD_OUT_PROBLEMS, rng)))


def problems(templates: Sequence[Template], count: int, rng: random.Random) -> Iterator[tuple[Problem, dict[str, Any]]]:
    """Each with its row."""
    for _ in range(count):
        problem = Problem(rng.choice(templates), rng.randint(2, 9))
        tests = [problem.tried(rng, length) for length in (4, 6, 8, 10)]
        yield problem, {"problem": problem.english, "example": problem.tried(rng, 4), "tests": tests}


def demonstrated(problem: Problem, row: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """What a careless colleague would have done."""
    calls: list[Call] = []
    while len(calls) < MOST_TRIES:
        tried = Problem(_careless(problem.template, rng), problem.k)
        seen = verdict(tried.outcome(row["example"]["xs"]), row["example"]["result"])
        calls.append(({"code": tried.code}, seen))
        if seen.endswith("right") or rng.random() >= TRIES_AGAIN:
            break
    task = CodingAgent(sandbox="none").task_from_row(row)
    return demonstration(CodingAgent, task, calls, answer=DONE)


def _careless(template: Template, rng: random.Random) -> Template:
    return Template(
        or_other(template.kept, KEPT, rng),
        or_other(template.changed, CHANGED, rng),
        or_other(template.combined, COMBINED, rng),
    )


if __name__ == "__main__":
    main()
