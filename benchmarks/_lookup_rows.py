"""Look-ups in records of several hops as rows of a file, for a pretrained model.

Writes careless demonstrations, tasks to train on, and longer ones to be judged by.
"""

import argparse
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentloop import Message, Task
from agentloop.environments.lookup_chain import SYSTEM_PROMPT, LookupChain
from examples.chat_rows import demonstration, write_lines

TRAINED, HELD_OUT = (2, 4), (5, 6)
"""Hops, fewest and most."""


class LookupRows(LookupChain):
    """The quickstart's environment; its tasks are rows."""

    def __init__(self, hops: tuple[int, int] = TRAINED) -> None:
        super().__init__(hops)

    def task_from_row(self, row: Mapping[str, Any]) -> Task:
        asked = Message("user", f'What is the code of "{row["key"]}"?')
        return Task((Message("system", SYSTEM_PROMPT), asked), row)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks._lookup_rows", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demonstrations", type=int, default=192)
    parser.add_argument("--tasks", type=int, default=4000)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(given.seed)
    shown = tasks(TRAINED, given.demonstrations, rng)
    write_lines(given.folder / "demonstrations.jsonl", (demonstrated(task, rng) for task in shown))
    write_lines(given.folder / "train.jsonl", (task.payload for task in tasks(TRAINED, given.tasks, rng)))
    write_lines(given.folder / "test.jsonl", (task.payload for task in tasks(HELD_OUT, 256, random.Random(0))))


def tasks(hops: tuple[int, int], count: int, rng: random.Random) -> Iterator[Task]:
    environment = LookupRows(hops)
    return (environment.make_task(rng) for _ in range(count))


def demonstrated(task: Task, rng: random.Random) -> dict[str, Any]:
    """What a careless colleague would have looked up, and answered."""
    environment, said, calls = LookupRows(), [*task.messages()], []
    environment.start(task)
    while (reply := environment.demonstrate(task, said, rng)).tool_calls:
        (call,) = reply.tool_calls
        found = environment.lookup(**call.arguments)
        calls.append((call.arguments, json.dumps(found)))
        said += [reply, Message("tool", calls[-1][1])]
    return demonstration(LookupRows, task, calls, answer=reply.content)


if __name__ == "__main__":
    main()
