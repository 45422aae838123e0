"""Gives exported rows another reward, so that a new run can learn from them under it:

agentloop replay export runs/before-001 rows.jsonl
python -m examples.changed_reward rows.jsonl rewarded.jsonl examples/changed_reward.py:brief
agentloop train CONFIG --set replay.attach.before=rewarded.jsonl
"""

import json
import sys
from collections import defaultdict
from statistics import fmean, pstdev

from agentloop.algorithms.baselines.grpo import group_advantages
from agentloop.user_code import load_function


def brief(row):
    """A success counts in full if it took at most three replies, and half if it took more."""
    return row["reward"] * (1.0 if row["num_turns"] <= 3 else 0.5)


def give_rewards(rows, reward):
    """Set reward, success and advantage of each row. A row is compared with the rows of its group that are there."""
    groups = defaultdict(list)
    for row in rows:
        row["reward"] = float(reward(row))
        row["success"] = row["reward"] >= 1.0
        groups[row["group_id"]].append(row)
    for members in groups.values():
        rewards = [row["reward"] for row in members]
        group = {
            "group_reward": fmean(rewards),
            "group_reward_std": pstdev(rewards),
            "group_success": fmean(row["success"] for row in members),
        }
        for row, advantage in zip(members, group_advantages(rewards, normalise_std=True), strict=True):
            row.update(group, advantage=advantage)


if __name__ == "__main__":
    source, target, function = sys.argv[1:]
    with open(source) as file:
        rows = [json.loads(line) for line in file]
    give_rewards(rows, load_function(function, what="FUNCTION"))
    with open(target, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
