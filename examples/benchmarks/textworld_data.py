"""Writes which games of TextWorld a run trains on and is judged by, and walkthroughs of a few to imitate first."""

import argparse
import random
from pathlib import Path
from typing import Any

from agentloop import Task, load_config
from agentloop.environments import EnvironmentFactory, open_tasks
from agentloop.rollouts.demonstrated import demonstrate
from context.messages import to_template
from examples.chat_rows import write_lines

FIRST_HELD_OUT = 1_000_000
"""Seeds from here on are never trained on, however many games there are to train on."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path, nargs="?", default=Path("examples/benchmarks/textworld.yaml"))
    parser.add_argument("--train", type=int, default=128, help="games to train on")
    parser.add_argument("--held-out", type=int, default=128, help="games to be judged by")
    parser.add_argument(
        "--demonstrations", type=int, default=24, help="of the last games to train on; 0: none are written"
    )
    parser.add_argument("--first", type=int, default=0, help="seed of the first game to train on")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="over the file's")
    given = parser.parse_args()
    config = load_config(given.config, given.set)
    seeds = {
        "train": range(given.first, given.first + given.train),
        "test": range(FIRST_HELD_OUT, FIRST_HELD_OUT + given.held_out),
    }
    for split, chosen in seeds.items():
        path = Path(str(config.tasks.data).replace("{split}", split))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_lines(path, ({"seed": seed} for seed in chosen))
    environments, tasks = open_tasks(config)  # makes every game
    if given.demonstrations:
        last = range(given.train - given.demonstrations, given.train)  # a run begins with the first
        shown = (demonstration(environments.all[0], tasks.train(number)) for number in last)
        write_lines(Path(str(config.sft.data)), shown)


def demonstration(factory: EnvironmentFactory, task: Task) -> dict[str, Any]:
    """A walkthrough, without what the game says last: nobody answers that."""
    environment = factory.create()
    try:
        messages = demonstrate(factory, environment, task, random.Random(0))
    finally:
        environment.close()
    last = max(place for place, message in enumerate(messages) if message.role == "assistant")
    shown = [*map(to_template, messages[: last + 1])]
    return {"messages": shown, "tools": list(factory.tools_for(task))}


if __name__ == "__main__":
    main()
