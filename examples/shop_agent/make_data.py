"""Writes what the shop's agent learns from and is judged by: questions as rows, and demonstrations."""

import json
import random
from pathlib import Path
from typing import Any

from agentloop import Task, load_config
from agentloop.environments import open_tasks
from examples.chat_rows import write_lines

FOLDER = Path("runs/shop_agent")
CONFIG = Path("examples/shop_agent/run.yaml")
FIELDS = ("price", "count", "shelf")
COLOURS = ["red", "blue", "green", "black", "white", "yellow"]
ARTICLES = {
    "train": [
        *("kettle", "hammer", "lamp", "rope", "bucket", "candle", "ladder"),
        *("spoon", "mirror", "basket", "pillow", "bottle", "carpet", "jacket"),
    ],
    "test": ["brush", "knife", "torch", "dish", "tent", "wallet", "drum"],
}
QUESTIONS = {
    "train": {
        "price": ["How much is the {}?", "What is the price of the {}?", "How many euros is one {}?"],
        "count": ["How many of the {} are left?", "What is the count of the {}?", "How often do we have the {}?"],
        "shelf": ["Where is the {}?", "On which shelf is the {}?", "Where do I find the {}?"],
    },
    "test": {
        "price": ["How much do I pay for the {}?", "Please tell me the price of one {}."],
        "count": ["How many of the {} do we have?", "Please count what is left of the {}."],
        "shelf": ["Where can I see the {}?", "Which shelf has the {}?"],
    },
}


def main() -> None:
    rng = random.Random(0)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for split, rows in (("train", 400), ("test", 128)):
        write_lines(FOLDER / f"{split}.jsonl", [row(split, rng) for _ in range(rows)])
    environments, tasks = open_tasks(load_config(CONFIG))
    tools = environments.all[0].tools
    shown = ({"messages": conversation(tasks.train(number), rng), "tools": tools} for number in range(128))
    write_lines(FOLDER / "demonstrations.jsonl", shown)


def row(split: str, rng: random.Random) -> dict[str, Any]:
    """A question about one of four articles, whose stock the tool sees and the policy does not."""
    names = [f"{rng.choice(COLOURS)} {article}" for article in rng.sample(ARTICLES[split], 4)]
    stock = {name: value_of_each(rng) for name in names}
    article, field = rng.choice(names), rng.choice(FIELDS)
    question = rng.choice(QUESTIONS[split][field]).format(article)
    return {"question": question, "answer": stock[article][field], "article": article, "field": field, "stock": stock}


def value_of_each(rng: random.Random) -> dict[str, str]:
    shelf = f"{rng.choice('ABCDEF')}{rng.randint(1, 30)}"
    return {"price": str(rng.randint(2, 99)), "count": str(rng.randint(2, 400)), "shelf": shelf}


def conversation(task: Task, rng: random.Random) -> list[dict[str, Any]]:
    """What a careless colleague did: half of the time another field, so that rewards have something to teach."""
    asked = task.payload
    others = [field for field in FIELDS if field != asked["field"]]
    field = asked["field"] if rng.random() < 0.5 else rng.choice(others)
    value = asked["stock"][asked["article"]][field]
    function = {"name": "look_up", "arguments": json.dumps({"article": asked["article"], "field": field})}
    return [
        *({"role": said.role, "content": said.content} for said in task.messages()),
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": value},
        {"role": "assistant", "content": value},
    ]


if __name__ == "__main__":
    main()
