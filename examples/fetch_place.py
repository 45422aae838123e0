"""A goal-conditioned environment with a state: fetch an item, and place it in a container.

Each item and each container stands in a room of its own, from which another item and two other containers can be seen.
An agent goes to the wanted item, takes it, goes to the wanted container and puts it there; what it sees on the way
leads it astray. One that carries another item, or uses another container, has done what another task asks: see
`achieved`. Two containers, for one that is always the only one in sight teaches to follow sight as much as the task.
"""

import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from agentloop.environments import Achieved, Environment, Task, tool
from agentloop.environments.lookup_chain import KEYS as WORDS
from context.authors import LLM
from context.messages import Message, ToolCall

SYSTEM_PROMPT = 'Go to the item, take it, go to the container, put it there. Answer: ".." is in "..".'
MAX_CALLS = 8
"""Most tool calls a demonstration makes."""
_UNKNOWN = {"error": "not here"}
Seen = Mapping[str, Mapping[str, Any]]
"""The `item` and the `containers` that can be seen from the room of each item and container."""
_IN_SIGHT = 2
"""Containers."""


class House:
    """Where the agent stands, what it holds, and what it has placed where."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.at: str | None = None
        self.holds: str | None = None
        self.placed: dict[str, str] = {}
        """Containers by item."""

    def go(self, place: str) -> dict[str, Any]:
        if place not in self.seen:
            return _UNKNOWN
        self.at = place
        return self._view(place)

    def take(self, item: str) -> dict[str, Any]:
        if self.holds is not None or item != self.at or not self.is_item(item):
            return _UNKNOWN
        self.holds = item
        self.placed.pop(item, None)
        return {"holds": item, **self._view(item)}

    def put(self, container: str) -> dict[str, str]:
        if self.holds is None or container != self.at or self.is_item(container):
            return _UNKNOWN
        self.placed[self.holds] = container
        placed, self.holds = self.holds, None
        return {"item": placed, "container": container}

    def _view(self, place: str) -> dict[str, Any]:
        """In one order: a stored payload does not keep that of its keys."""
        return {kind: self.seen[place][kind] for kind in ("item", "containers")}

    def is_item(self, name: str) -> bool:
        return any(seen["item"] == name for seen in self.seen.values())


class _Made(NamedTuple):
    """A call that was made again."""

    name: str
    word: str
    """Its argument."""
    good: bool
    """False: it did nothing."""


class FetchPlace(Environment):
    """Reward 1 where the item is in the container and the agent ends with `"pearl" is in "reed".`, else 0."""

    deterministic = True

    def __init__(
        self,
        items: int = 8,
        containers: int = 8,
        p_take: float = 0.5,
        p_goal: float = 0.5,
        p_put: float = 0.5,
        *,
        delay_s: float = 0.0,
    ) -> None:
        """There are so many `items` and `containers`.

        At an item the demonstrator takes it with probability `p_take`, else goes to the one it sees; with an item in
        hand it goes to the wanted container with probability `p_goal`, else to one it sees; at a container it puts
        the item there with probability `p_put`. A call takes `delay_s` seconds.
        """
        if not (items >= 2 and containers > _IN_SIGHT and items + containers <= len(WORDS)):
            raise ValueError(
                f"items must be >= 2, containers > {_IN_SIGHT} and both together at most {len(WORDS)}, got {items} "
                f"and {containers}"
            )
        if not all(0.0 <= p <= 1.0 for p in (p_take, p_goal, p_put)):
            raise ValueError(f"p_take, p_goal and p_put must be between 0 and 1, got {p_take}, {p_goal} and {p_put}")
        if not 0.0 <= delay_s < math.inf:
            raise ValueError(f"delay_s must be >= 0, got {delay_s}")
        self.sizes = (items, containers)
        self.p_take, self.p_goal, self.p_put = p_take, p_goal, p_put
        self.delay_s = delay_s
        self._house = House({})

    def make_task(self, rng: random.Random) -> Task:
        names = rng.sample(WORDS, sum(self.sizes))
        items, containers = names[: self.sizes[0]], names[self.sizes[0] :]
        seen = {
            place: {
                "item": rng.choice([item for item in items if item != place]),
                "containers": rng.sample([container for container in containers if container != place], _IN_SIGHT),
            }
            for place in names
        }
        # Every item can be seen from somewhere: that is what makes it one.
        for item, following in zip(items, [*items[1:], items[0]], strict=True):
            seen[item]["item"] = following
        return _task(seen, items[0], containers[0])

    def start(self, task: Task) -> None:
        self._house = House(task.payload["seen"])

    @tool
    def go(self, place: str) -> dict[str, Any]:
        """Go to the room of an item or a container, and look around."""
        time.sleep(self.delay_s)
        return self._house.go(place)

    @tool
    def take(self, item: str) -> dict[str, Any]:
        """Take the item of this room."""
        time.sleep(self.delay_s)
        return self._house.take(item)

    @tool
    def put(self, container: str) -> dict[str, str]:
        """Put what you hold into the container of this room."""
        time.sleep(self.delay_s)
        return self._house.put(container)

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        house, item, container = House(task.payload["seen"]), task.payload["item"], task.payload["container"]
        _make_again(house, messages)
        last = messages[-1]
        says_so = last.role == "assistant" and not last.tool_calls and last.content == _answer(item, container)
        return float(says_so and house.placed.get(item) == container)

    def achieved(self, task: Task, messages: Sequence[Message]) -> Sequence[Achieved]:
        """What was put somewhere last and said so, from the way to that item on."""
        house = House(task.payload["seen"])
        made, turns = _make_again(house, messages), [message for message in messages if message.author == LLM]
        if len(made) != len(turns) - 1 or any(len(turn.tool_calls) != 1 for turn in turns[:-1]):
            return ()
        put = _last(made, "put", len(made))
        take = _last(made, "take", put)
        way = _last(made, "go", take)
        end = made[way:]
        if way < 0 or len({(one.name, one.word) for one in end}) < len(end):
            return ()  # nothing was placed, or it went in circles
        item, container = made[take].word, made[put].word
        if house.placed.get(item) != container or turns[-1].content != _answer(item, container):
            return ()
        return (Achieved(_task(house.seen, item, container), first_turn=way),)

    def demonstrate(self, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
        """Careless, but never wrong about the form: it goes to what it was asked for or sees, and takes what is there.

        It keeps to MAX_CALLS: near them it wanders no more.
        """
        house, item, container = House(task.payload["seen"]), task.payload["item"], task.payload["container"]
        made = _make_again(house, messages)
        if made and made[-1].name == "put":
            placed = json.loads(messages[-1].content)
            return Message("assistant", _answer(placed["item"], placed["container"]), author=LLM)
        if house.at is None:
            return _call("go", "place", item)
        # From an item it takes four calls to the end: take, go, put; from a container two.
        may_wander = len(made) + 4 < MAX_CALLS
        seen = house.seen[house.at]
        if house.holds is None:
            if rng.random() < self.p_take or not may_wander:
                return _call("take", "item", house.at)
            return _call("go", "place", seen["item"])
        if house.is_item(house.at):
            return _call("go", "place", container if rng.random() < self.p_goal else rng.choice(seen["containers"]))
        if rng.random() < self.p_put or not may_wander:
            return _call("put", "container", house.at)
        return _call("go", "place", rng.choice(seen["containers"]))


def _answer(item: str, container: str) -> str:
    return f'"{item}" is in "{container}".'


def _task(seen: Seen, item: str, container: str) -> Task:
    prompt = (Message("system", SYSTEM_PROMPT), Message("user", f'Put "{item}" in "{container}".'))
    return Task(prompt, {"seen": seen, "item": item, "container": container})


def _make_again(house: House, messages: Sequence[Message]) -> list[_Made]:
    """Every call of the agent's, made in `house`."""
    tools = {"go": (house.go, "place"), "take": (house.take, "item"), "put": (house.put, "container")}
    made = []
    for call in (call for message in messages if message.author == LLM for call in message.tool_calls):
        if call.name in tools:
            function, key = tools[call.name]
            word = str(call.arguments.get(key))
            made.append(_Made(call.name, word, function(word) is not _UNKNOWN))
    return made


def _last(made: Sequence[_Made], name: str, before: int) -> int:
    """The place of the last such call that did something; -1: there is none."""
    return max((i for i in range(max(before, 0)) if made[i].name == name and made[i].good), default=-1)


def _call(name: str, key: str, word: str) -> Message:
    return Message("assistant", "", author=LLM, tool_calls=(ToolCall(name, {key: word}),))
