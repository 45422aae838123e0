"""Tools, rewards and advantages as functions that people write, good and bad."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from agentloop import NotJudged, Task, tool
from agentloop.rollouts.episodes.episode import Episode

if TYPE_CHECKING:
    from agentloop.algorithms.declarations import Member  # which imports torch, as no worker does


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


@tool(deterministic=True)
def look_again(key: str, task: Task) -> str:
    """Look once more."""
    return look(key, task)


def start(a: int) -> int:
    """Has the name of a method of every environment."""
    return a


def undocumented(a: int) -> int:
    return a


def right(episode: Episode, answer: str) -> float:
    return float(episode.answer == answer)


def even(episode: Episode) -> float:
    """1 for a last message of even length, which a random policy writes half of the time."""
    return float(len(episode.messages[-1].content) % 2 == 0)


def said(episode: Episode, answer: str, *, bonus: float = 0.5) -> float:
    return bonus if answer in episode.messages[-1].content else 0.0


def columns(episode: Episode, **row: Any) -> float:
    return float(len(row))


async def awaited(episode: Episode, answer: str) -> float:
    await asyncio.sleep(0)
    return right(episode, answer)


def bounded(top: Annotated[int, Field(ge=1, description="How many.")] = 3) -> str:
    """Search."""
    return str(top)


def misspelt(episode: Episode, anser: str) -> float:
    return 0.0


_running = 0


def brief(episode: Episode) -> float:
    return -0.01 * episode.num_tokens


async def judged(episode: Episode) -> float:
    """Waits like a request to a server, so that later calls can end first."""
    await asyncio.sleep(0.01 if len(episode.messages[-1].content) % 2 else 0.0)
    return float(len(episode.messages[-1].content))


async def crowd(episode: Episode) -> float:
    """Returns the number of calls under way."""
    global _running
    _running += 1
    seen = _running
    await asyncio.sleep(0.005)
    _running -= 1
    return float(seen)


def picky(episode: Episode) -> float:
    if episode.messages[-1].content == "bad":
        raise ConnectionError("no\nanswer")
    if episode.messages[-1].content == "away":
        raise NotJudged("the judge is away")
    return 1.0


def endless(episode: Episode) -> float:
    time.sleep(60)
    return 1.0


async def waiting(episode: Episode) -> float:
    await asyncio.sleep(60)
    return 1.0


def best_of_group(members: Sequence[Member]) -> list[float]:
    """1 for the best member, 0.5 if it is replayed; 0 in a group of one."""
    best = max(member.reward for member in members)
    return [(0.5 if one.replayed else 1.0) * (one.reward == best) if len(members) > 1 else 0.0 for one in members]


def too_short(members: Sequence[Member]) -> list[float]:
    return [0.0]


def not_a_number(members: Sequence[Member]) -> list[float]:
    return [float("nan")] * len(members)
