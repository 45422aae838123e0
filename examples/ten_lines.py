import sys
from typing import Literal

import agentloop


def calculate(a: int, operation: Literal["+", "-", "*"], b: int) -> int:
    """Calculate with two whole numbers."""
    return {"+": a + b, "-": a - b, "*": a * b}[operation]


def right(episode, answer):
    return float(episode.answer.strip() == str(answer))


if __name__ == "__main__":
    run = agentloop.train(
        model=sys.argv[1],
        tools=[calculate],
        reward=right,
        tasks="examples/word_problems.jsonl",
        environment={"options": {"prompt": "question", "system": "Answer with the number alone."}},
        replay={"fraction": 0.25},
    )
    print(run)
