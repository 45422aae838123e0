"""Functions as people give them in place of an environment class, good and bad."""

from __future__ import annotations

import asyncio
from typing import Any

from agentloop import Task, tool
from agentloop.rollouts.episodes.episode import Episode


def add(a: int, b: int = 2) -> int:
    """Add two numbers."""
    return a + b


async def later(text: str) -> str:
    """Say it later."""
    await asyncio.sleep(0)
    return text


def look(key: str, task: Task) -> str:
    """Look into the row."""
    return str(task.payload["store"][key])


@tool(deterministic=True, isolated=True)
def apart(key: str, task: Task) -> str:
    """Look from a process of its own."""
    return look(key, task)


def start(a: int) -> int:
    """Is named like a method of every environment."""
    return a


def undocumented(a: int) -> int:
    return a


def right(episode: Episode, answer: str) -> float:
    return float(episode.answer == answer)


def even(episode: Episode) -> float:
    """1 for a last message of an even number of characters: a random policy is right half of the time."""
    return float(len(episode.messages[-1].content) % 2 == 0)


def said(episode: Episode, answer: str, *, bonus: float = 0.5) -> float:
    return bonus if answer in episode.messages[-1].content else 0.0


def columns(episode: Episode, **row: Any) -> float:
    return float(len(row))


async def awaited(episode: Episode, answer: str) -> float:
    await asyncio.sleep(0)
    return right(episode, answer)


def of_lists(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
    return [0.0 for _ in completions]


def misspelt(episode: Episode, anser: str) -> float:
    return 0.0
