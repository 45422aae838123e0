"""Rows of JSON with something wrong in them: what files from elsewhere hold."""

import math
import random
from copy import deepcopy
from typing import Any

ODD: list[Any] = [
    *(None, True, 0, -1, 1.5, 10**400, 1e308, math.nan, math.inf, "", "x", "\ud800", "\x00", "\n", "<|im_end|>"),
    *([], {}, [None], [[]], ["x"], {"a": 1}, [{"type": "text", "text": 5}], [{"type": "text", "text": "x"}]),
    *("[1]", '{"a": NaN}', '{"a": 1e999}', '{"a":' * 300 + "1" + "}" * 300),
    *({"role": "assistant", "content": "x"}, {"function": 5}),
]


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all that is in a value of JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, one in inner for place in [(*at, key), *places(one, (*at, key))]]


def altered(row: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """One or two things of it left out, twice there, or something odd."""
    made = deepcopy(row)
    for _ in range(chance.choice([1, 1, 2])):
        *within, last = chance.choice(places(made))
        holder: Any = made
        for key in within:
            holder = holder[key]
        way = chance.random()
        if way < 0.2:
            del holder[last]
        elif way < 0.3 and isinstance(holder, list):
            holder.insert(last, holder[last])
        else:
            holder[last] = deepcopy(chance.choice(ODD))
    return made
