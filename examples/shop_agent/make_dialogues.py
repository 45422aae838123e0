"""Writes dialogues at the service desk by its own demonstrator, for `agentloop sft`."""

from itertools import islice
from pathlib import Path

from agentloop import load_config
from agentloop.environments import open_tasks
from agentloop.rollouts.demonstrated import demonstrations
from context.messages import to_template
from examples.chat_rows import write_lines

CONFIG = Path("examples/shop_agent/service_desk.yaml")
DIALOGUES = Path("runs/service_desk/demonstrations.jsonl")


def main() -> None:
    environments, _ = open_tasks(load_config(CONFIG))
    (desk,) = environments.all
    DIALOGUES.parent.mkdir(parents=True, exist_ok=True)
    shown = islice(demonstrations(desk, seed=0), 128)
    write_lines(DIALOGUES, [{"messages": [*map(to_template, messages)], "tools": desk.tools} for _, messages in shown])


if __name__ == "__main__":
    main()
