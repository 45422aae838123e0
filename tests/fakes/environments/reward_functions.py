"""Reward and advantage functions as people write them, good and bad."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from agentloop.algorithms.advantages import Member
from agentloop.rollouts.rewards import Episode

running = 0


def brief(episode: Episode) -> float:
    return -0.01 * episode.num_tokens


async def judged(episode: Episode) -> float:
    """Waits, as for a server; who is asked later can answer first."""
    await asyncio.sleep(0.01 if len(episode.messages[-1].content) % 2 else 0.0)
    return float(len(episode.messages[-1].content))


async def crowd(episode: Episode) -> float:
    """How many are being answered."""
    global running
    running += 1
    seen = running
    await asyncio.sleep(0.005)
    running -= 1
    return float(seen)


def picky(episode: Episode) -> float:
    if episode.messages[-1].content == "bad":
        raise ConnectionError("no\nanswer")
    return 1.0


def endless(episode: Episode) -> float:
    time.sleep(60)
    return 1.0


async def waiting(episode: Episode) -> float:
    await asyncio.sleep(60)
    return 1.0


def best_of_group(members: Sequence[Member]) -> list[float]:
    """1 for the best, less for a replayed one; 0 if there is only one."""
    best = max(member.reward for member in members)
    return [
        (0.5 if member.replayed else 1.0) * (member.reward == best) if len(members) > 1 else 0.0 for member in members
    ]


def too_short(members: Sequence[Member]) -> list[float]:
    return [0.0]


def not_a_number(members: Sequence[Member]) -> list[float]:
    return [float("nan")] * len(members)
