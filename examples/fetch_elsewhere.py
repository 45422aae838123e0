"""Fetch and place with a reversed wish: the item is to be put into any container but the named one."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentloop.environments import Task
from context.messages import Message
from examples.fetch_place import FetchPlace


class Elsewhere(FetchPlace):
    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        *_, put, answer = messages
        return _reward(task.payload, put.content, answer.content)


def elsewhere(row: Mapping[str, Any]) -> float:
    """Of an exported row."""
    *_, put, answer = row["messages"]
    return _reward(json.loads(row["task_payload"]), put["content"], answer["content"])


def _reward(task: Mapping[str, Any], result: str, answer: str) -> float:
    """`result`: of the last call."""
    found = json.loads(result) if result.startswith("{") else {}
    item, container = task["item"], found.get("container")
    is_elsewhere = found.get("item") == item and container not in (None, task["container"])
    return float(is_elsewhere and answer == f'"{item}" is in "{container}".')
