"""A shop: a tool that looks an article up, and the reward of an answer."""

from typing import Literal

from agentloop import Task


def look_up(article: str, field: Literal["price", "count", "shelf"], task: Task) -> str:
    """Look up an article of the shop.

    Args:
        article: Its whole name, as the customer says it.
        field: What to read: its price in euros, the count of those left, or its shelf.
    """
    stock = task.payload["stock"]
    if article not in stock:
        raise KeyError(f"no article is named {article!r}")
    return str(stock[article][field])


def right(episode, answer):
    """1 for the value alone, with or without a full stop; `answer` is that column of the episode's row."""
    return float(episode.answer.strip().rstrip(".") == answer)
