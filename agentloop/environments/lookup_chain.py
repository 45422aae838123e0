"""The quickstart's environment: the policy follows a chain of records to its code, past decoys.

Every task has a random store of 32 keys. A record is {"next": key, "see": key} on the way or {"code": "78", "see": key}
at the end of a chain. Following `next` from the asked key ends at the right code; `see` leads into other chains, which
look alike and end in wrong codes, and no way leads back.
"""

import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

from agentloop.environments.environment import Achieved, Environment, Task, tool
from context.authors import DEMONSTRATION, LLM
from context.messages import Message, ToolCall

# Words and codes that a byte-level tokenizer of a few hundred entries makes one token each.
KEYS = (
    *("pearl", "arrow", "coral", "amber", "bell", "birch", "boat", "cabin"),
    *("cedar", "clay", "cloud", "dune", "fern", "field", "flint", "gate"),
    *("grove", "hill", "iron", "ivory", "lake", "leaf", "lily", "moon"),
    *("oak", "plum", "rain", "reed", "salt", "stone", "tower", "wolf"),
)
CODES = tuple(str(number) for number in range(50, 100))
MAX_CALLS = 8
"""Most tool calls that a demonstration makes, and so the length of the longest chain."""
LONGEST_DECOY = 3
"""Records of the longest wrong chain; short wrong chains keep careless episodes short."""
FILLER = ("this", "page", "also", "has", "some", "old", "text")
"""Words that pad a tool result: each is one token, none is a key."""
SYSTEM_PROMPT = 'Look up keys. Follow "next" until a record has a code. Answer: The code is "..".'

Record = dict[str, str]


class LookupChain(Environment):
    """Reward 1 for exactly `The code is "78".` with the right code, else 0."""

    def __init__(
        self,
        hops: tuple[int, int] = (2, 5),
        p_next: float = 0.5,
        p_stop: float = 0.5,
        *,
        thinking: bool = False,
        padding: int = 0,
        delay_s: float = 0.0,
    ) -> None:
        """`hops` is the fewest and the most lookups that a task needs.

        The demonstrator follows `next` with probability `p_next` and stops at a code with probability `p_stop`. With
        `thinking` it names the field that it follows. Tool results end in `padding` words, and a lookup takes
        `delay_s` seconds.
        """
        if not 1 <= hops[0] <= hops[1] <= MAX_CALLS:
            raise ValueError(f"hops must be [fewest, most] with 1 <= fewest <= most <= {MAX_CALLS}, got {list(hops)}")
        self.hops, self.p_next, self.p_stop = hops, p_next, p_stop
        self.thinking, self.padding, self.delay_s = thinking, padding, delay_s
        self._store: Mapping[str, Record] = {}

    def make_task(self, rng: random.Random) -> Task:
        lengths = [rng.randint(*self.hops)]
        while sum(lengths) < len(KEYS):
            lengths.append(min(rng.randint(1, LONGEST_DECOY), len(KEYS) - sum(lengths)))
        keys = iter(rng.sample(KEYS, len(KEYS)))
        chains = [[next(keys) for _ in range(length)] for length in lengths]
        codes = rng.sample(CODES, len(chains))
        decoys = [key for chain in chains[1:] for key in chain]
        store: dict[str, Record] = {}
        for chain, code in zip(chains, codes, strict=True):
            for place, key in enumerate(chain):
                following = chain[place + 1] if place + 1 < len(chain) else None
                way = {"code": code} if following is None else {"next": following}
                see = rng.choice([decoy for decoy in decoys if decoy not in (key, following)])
                store[key] = {**way, "see": see}
        trail = ", ".join(f'"{key}"' for key in chains[0])
        return replace(_task(chains[0], codes[0], store), hint=f"The trail: {trail}.")

    def start(self, task: Task) -> None:
        self._store = task.payload["store"]

    @tool(deterministic=True)
    def lookup(self, key: str) -> dict[str, str]:
        """Look up the record of a key."""
        time.sleep(self.delay_s)
        record = self._store.get(key, {"error": "unknown key"})
        note = " ".join(islice(cycle(FILLER), self.padding))
        return {**record, "note": note} if note else record

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        last = messages[-1]
        right = last.role == "assistant" and not last.tool_calls and last.content == _answer(task.payload["code"])
        return float(right)

    def turn_rewards(self, task: Task, messages: Sequence[Message]) -> Sequence[float]:
        """Give 1 / hops to each reply that looks up the next key of the trail, so that a whole trail earns 1."""
        due: str | None = task.payload["key"]
        rewards = []
        for message in messages:
            if message.author not in (LLM, DEMONSTRATION):
                continue
            earned = 0.0
            for call in message.tool_calls:
                if due is not None and call.arguments.get("key") == due:
                    earned += 1 / task.payload["hops"]
                    due = task.payload["store"][due].get("next")
            rewards.append(earned)
        return rewards

    def achieved(self, task: Task, messages: Sequence[Message]) -> Sequence[Achieved]:
        """Return the task of the key from which the last lookups followed `next` to the answer."""
        replies = [message for message in messages if message.author == LLM]
        store: Mapping[str, Record] = task.payload["store"]
        keys = [
            str(reply.tool_calls[0].arguments.get("key")) if len(reply.tool_calls) == 1 else "" for reply in replies
        ]
        answer, called = replies[-1], keys[:-1]
        trail: list[str] = []
        for key in reversed(called):
            if key not in store or (trail and store[key].get("next") != trail[0]):
                break
            trail.insert(0, key)
        code = store[trail[-1]].get("code") if trail else None
        if code is None or answer.content != _answer(code):
            return ()
        return (Achieved(_task(trail, code, store), first_turn=len(called) - len(trail)),)

    def demonstrate(self, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
        """Give the next careless reply: it looks up keys that it was shown, and reaches a code within MAX_CALLS."""
        calls_left = MAX_CALLS - sum(len(message.tool_calls) for message in messages)
        if messages[-1].role != "tool":
            return self._call("key", task.payload["key"])
        record: Record = json.loads(messages[-1].content)
        see_in_time = _lookups_to_code(task.payload["store"], record["see"]) <= calls_left
        if "code" in record and (rng.random() < self.p_stop or not see_in_time):
            return self._reply("code", record["code"], _answer(record["code"]))
        if "next" in record and (rng.random() < self.p_next or not see_in_time):
            return self._call("next", record["next"])
        return self._call("see", record["see"])

    def _call(self, field: str, key: str) -> Message:
        return self._reply(field, key, "", ToolCall("lookup", {"key": key}))

    def _reply(self, field: str, value: str, content: str, *calls: ToolCall) -> Message:
        reasoning = f'{field} is "{value}"' if self.thinking else None
        return Message("assistant", content, author=LLM, tool_calls=calls, reasoning=reasoning)


def _task(trail: Sequence[str], code: str, store: Mapping[str, Record]) -> Task:
    prompt = (Message("system", SYSTEM_PROMPT), Message("user", f'What is the code of "{trail[0]}"?'))
    return Task(prompt, {"key": trail[0], "code": code, "hops": len(trail), "store": store})


def _lookups_to_code(store: Mapping[str, Record], key: str) -> int:
    count = 1
    while "next" in store[key]:
        key = store[key]["next"]
        count += 1
    return count


def _answer(code: Any) -> str:
    return f'The code is "{code}".'
