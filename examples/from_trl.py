"""Rows and a reward function of TRL's GRPOTrainer, trained here as they are: python examples/from_trl.py MODEL"""

import sys

import agentloop
from context.messages import to_template

# As for TRL. The rows may also be a datasets.Dataset.
ROWS = [
    {"prompt": [{"role": "user", "content": f"What is {a} plus {b}? Answer with the number."}], "solution": str(a + b)}
    for a in range(10, 30)
    for b in range(10, 30)
]


def right(completions, solution, **columns):
    return [float(said[-1]["content"].strip() == answer) for said, answer in zip(completions, solution, strict=True)]


# New: an episode at a time instead of a batch.
def right_here(episode, **row):
    completion = [to_template(message) for message in episode.messages[len(episode.task.messages()) :]]
    columns = {name: [value] for name, value in row.items() if name != "prompt"}
    return right(completions=[completion], **columns)[0]


def train(model, **sections):
    return agentloop.train(
        model=model,
        reward=right_here,
        tasks=ROWS,
        replay={"fraction": 0.25},
        batch={"trajectories": 64, "group_size": 8},  # generation_batch_size, num_generations
        rollout={"max_tokens_per_turn": 256},  # max_completion_length
        optimizer={"learning_rate": 1.0e-6},
        **sections,
    )


if __name__ == "__main__":
    train(sys.argv[1], run={"iterations": 100})  # max_steps
