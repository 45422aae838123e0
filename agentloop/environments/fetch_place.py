"""A goal-conditioned environment: find an item in some room, and put it in a container that stands in another one.

Every task has rooms with containers with items, all of them random: an agent has to search, to remember what it saw
where, and to tell the wanted item and container from others. One that carries the wrong thing, or puts it in the wrong
place, has done what another task asks, which `achieved` tells.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentloop.environments.environment import Achieved, Environment, Task, tool
from agentloop.environments.lookup_chain import KEYS as WORDS
from context.authors import LLM
from context.messages import Message, ToolCall

SYSTEM_PROMPT = 'Go to rooms, take an item and put it where it belongs. Say: ".." is in "..".'
_UNKNOWN = {"error": "not here"}
Rooms = Mapping[str, Mapping[str, Sequence[str]]]
"""Items by container by room."""


class World:
    """What there is, and where the agent stands with what in its hands."""

    def __init__(self, rooms: Rooms) -> None:
        # By name: a stored payload does not keep the order of keys.
        self.rooms = {
            room: {box: list(items) for box, items in sorted(boxes.items())} for room, boxes in sorted(rooms.items())
        }
        self.at: str | None = None
        self.holds: str | None = None

    def go(self, room: str) -> dict[str, Any]:
        if room not in self.rooms:
            return _UNKNOWN
        self.at = room
        return {box: list(items) for box, items in self.rooms[room].items()}

    def take(self, item: str) -> dict[str, Any]:
        box = next((items for items in self._here.values() if item in items), None)
        if box is None or self.holds is not None:
            return _UNKNOWN
        box.remove(item)
        self.holds = item
        return {"holds": item}

    def put(self, container: str) -> dict[str, Any]:
        if container not in self._here or self.holds is None:
            return _UNKNOWN
        self._here[container].append(self.holds)
        self.holds = None
        return {container: list(self._here[container])}

    def box_of(self, item: str) -> str | None:
        """The container with the item; None while it is held, or where there is none such."""
        boxes = (boxes for room in self.rooms.values() for boxes in room.items())
        return next((box for box, items in boxes if item in items), None)

    @property
    def _here(self) -> dict[str, list[str]]:
        return {} if self.at is None else self.rooms[self.at]


@dataclass(frozen=True)
class _Done:
    """A call, and what it changed."""

    name: str
    word: str
    """Its argument."""
    good: bool
    before: Rooms
    """As the rooms were."""
    held: str | None
    """What was in hand before."""


class FetchPlace(Environment):
    """Reward 1 where the item is in the container, and the agent ends with `"pearl" is in "reed".`, else 0."""

    deterministic = True

    def __init__(
        self,
        rooms: int = 3,
        containers: int = 2,
        items: int = 4,
        p_item: float = 0.5,
        p_container: float = 0.5,
        *,
        delay_s: float = 0.0,
    ) -> None:
        """`containers` is those of each room, `items` all there are.

        The demonstrator takes the wanted item rather than another one that it sees with probability `p_item`, and puts
        what it holds into the wanted container rather than another one with probability `p_container`.
        """
        if not (rooms >= 2 and containers >= 1 and items >= 2 and rooms * (1 + containers) + items <= len(WORDS)):
            raise ValueError(
                f"rooms must be >= 2, containers >= 1 and items >= 2, with at most {len(WORDS)} names for all of them, "
                f"got {rooms}, {containers} and {items}"
            )
        if not (0.0 <= p_item <= 1.0 and 0.0 <= p_container <= 1.0):
            raise ValueError(f"p_item and p_container must be between 0 and 1, got {p_item} and {p_container}")
        if not 0.0 <= delay_s < math.inf:
            raise ValueError(f"delay_s must be >= 0, got {delay_s}")
        self.sizes = (rooms, containers, items)
        self.p_item = p_item
        self.p_container = p_container
        self.delay_s = delay_s
        self._world = World({})

    def make_task(self, rng: random.Random) -> Task:
        rooms, containers, items = self.sizes
        names = iter(rng.sample(WORDS, rooms * (1 + containers) + items))
        world: dict[str, dict[str, list[str]]] = {
            next(names): {next(names): [] for _ in range(containers)} for _ in range(rooms)
        }
        boxes = [(room, box) for room in world for box in world[room]]
        for item in names:
            room, box = rng.choice(boxes)
            world[room][box].append(item)
        origin, item = rng.choice([(room, item) for room in world for box in world[room].values() for item in box])
        goal = rng.choice([box for room, box in boxes if room != origin])
        return _task(world, item, goal)

    def start(self, task: Task) -> None:
        self._world = World(task.payload["rooms"])

    @tool
    def go(self, room: str) -> dict[str, Any]:
        """Go to a room and see what is in it."""
        time.sleep(self.delay_s)
        return self._world.go(room)

    @tool
    def take(self, item: str) -> dict[str, Any]:
        """Take an item of this room."""
        time.sleep(self.delay_s)
        return self._world.take(item)

    @tool
    def put(self, container: str) -> dict[str, Any]:
        """Put what you hold into a container of this room."""
        time.sleep(self.delay_s)
        return self._world.put(container)

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        world = World(task.payload["rooms"])
        for _ in _played(world, messages):
            pass
        item, container, last = task.payload["item"], task.payload["container"], messages[-1]
        says_so = last.role == "assistant" and not last.tool_calls and last.content == _answer(item, container)
        return float(says_so and world.box_of(item) == container)

    def achieved(self, task: Task, messages: Sequence[Message]) -> Sequence[Achieved]:
        """What was put somewhere last, from the last room that was entered before it was taken."""
        world = World(task.payload["rooms"])
        turns = [message for message in messages if message.author == LLM]
        played = _played(world, messages)
        if any(len(turn.tool_calls) != 1 for turn in turns[:-1]):
            return ()
        put = _last(played, "put", len(played))
        take = _last(played, "take", put)
        entered = _last(played, "go", take)
        if entered < 0 or played[entered].held is not None:
            return ()
        end = [(one.name, one.word) for one in played[entered:]]
        if len(played) != len(turns) - 1 or len(set(end)) < len(end):
            return ()  # it went in circles
        before, item, container = played[entered].before, played[take].word, played[put].word
        done = world.box_of(item) == container and turns[-1].content == _answer(item, container)
        if not done or World(before).box_of(item) == container:
            return ()
        return (Achieved(_task(before, item, container), first_turn=entered),)

    def demonstrate(self, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
        """Careless, but never wrong about the form: it takes and puts only what it sees."""
        world = World(task.payload["rooms"])
        played = _played(world, messages)
        put = _last(played, "put", len(played))
        if put >= 0:
            carried = played[_last(played, "take", put)].word
            return Message("assistant", _answer(carried, played[put].word), author=LLM)
        here = {} if world.at is None else world.rooms[world.at]
        wanted, others = task.payload["item"], [item for box in here.values() for item in box]
        careless = self.p_item
        if world.holds is not None:
            wanted, others, careless = task.payload["container"], list(here), self.p_container
        tool_name = "take" if world.holds is None else "put"
        unseen = [room for room in world.rooms if room not in {one.word for one in played if one.name == "go"}]
        others = [other for other in others if other != wanted]
        if wanted in here or any(wanted in box for box in here.values()):
            chosen = wanted if not others or rng.random() < careless else rng.choice(others)
            return _call(tool_name, chosen)
        # It must end: where all has been seen, it goes back to what it saw.
        if others and (rng.random() >= math.sqrt(careless)):
            return _call(tool_name, rng.choice(others))
        return _call("go", unseen[0] if unseen else _room_of(world, wanted))


def _answer(item: str, container: str) -> str:
    return f'"{item}" is in "{container}".'


def _task(rooms: Rooms, item: str, container: str) -> Task:
    world = World(rooms).rooms
    listed = " ".join(f'"{room}"' for room in world)
    prompt = (Message("system", SYSTEM_PROMPT), Message("user", f'Rooms: {listed}. Put "{item}" in "{container}".'))
    return Task(prompt, {"rooms": world, "item": item, "container": container})


def _played(world: World, messages: Sequence[Message]) -> list[_Done]:
    """Every call of the agent's, made again in `world`."""
    tools = {"go": (world.go, "room"), "take": (world.take, "item"), "put": (world.put, "container")}
    played = []
    for call in (call for message in messages if message.author == LLM for call in message.tool_calls):
        if call.name in tools:
            function, key = tools[call.name]
            word = str(call.arguments.get(key))
            before, held = World(world.rooms).rooms, world.holds
            played.append(_Done(call.name, word, function(word) is not _UNKNOWN, before, held))
    return played


def _last(played: Sequence[_Done], name: str, before: int) -> int:
    """The place of the last such call that did something; -1: there is none."""
    return max((i for i in range(max(before, 0)) if played[i].name == name and played[i].good), default=-1)


def _room_of(world: World, wanted: str) -> str:
    return next(
        room
        for room, boxes in world.rooms.items()
        if wanted in boxes or any(wanted in items for items in boxes.values())
    )


def _call(name: str, word: str) -> Message:
    key = {"go": "room", "take": "item", "put": "container"}[name]
    return Message("assistant", "", author=LLM, tool_calls=(ToolCall(name, {key: word}),))
