"""Problems about lists of numbers in English, each with code that solves it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from agentloop.environments.sandbox import Returned

KEPT = {
    "even": ("even numbers", "x % 2 == 0"),
    "odd": ("odd numbers", "x % 2 == 1"),
    "positive": ("positive numbers", "x > 0"),
    "negative": ("negative numbers", "x < 0"),
    "above": ("numbers above {k}", "x > {k}"),
    "below": ("numbers below {k}", "x < {k}"),
    "multiples": ("multiples of {k}", "x % {k} == 0"),
    "others": ("numbers other than {k}", "x != {k}"),
}
CHANGED = {
    "squares": ("squares of the", "x * x"),
    "doubles": ("doubles of the", "2 * x"),
    "opposites": ("opposites of the", "-x"),
    "sizes": ("sizes of the", "abs(x)"),
    "last_digits": ("last digits of the", "x % 10"),
    "successors": ("successors of the", "x + 1"),
    "halves": ("halves of the", "x // 2"),
}
COMBINED = {
    "sum": ("the sum of the", "sum(ys)"),
    "largest": ("the largest of the", "max(ys)"),
    "smallest": ("the smallest of the", "min(ys)"),
    "different": ("how many different there are of the", "len(set(ys))"),
    "list": ("the list of the", "ys"),
    "sorted": ("in order the", "sorted(ys)"),
    "falling": ("in falling order the", "sorted(ys)[::-1]"),
    "range": ("the range of the", "max(ys) - min(ys)"),
}


@dataclass(frozen=True)
class Template:
    """Which numbers count, what is made of each, and what of all of them."""

    kept: str
    changed: str
    combined: str


_ALL = [Template(*parts) for parts in product(KEPT, CHANGED, COMBINED)]


def _is_held_out(template: Template) -> bool:
    """A quarter: each of its parts is in others, and no other has all three."""
    parts = (template.kept, KEPT), (template.changed, CHANGED), (template.combined, COMBINED)
    return sum(list(names).index(name) for name, names in parts) % 4 == 0


HELD_OUT = tuple(template for template in _ALL if _is_held_out(template))
TRAINED = tuple(template for template in _ALL if not _is_held_out(template))


@dataclass(frozen=True)
class Problem:
    template: Template
    k: int
    """The number that some templates name."""

    @property
    def english(self) -> str:
        kept, changed, combined = (words for words, _ in self._parts)
        return f"Return {combined} {changed} {kept} in xs."

    @property
    def code(self) -> str:
        kept, changed, combined = (code for _, code in self._parts)
        return f"def solve(xs):\n    ys = [{changed} for x in xs if {kept}]\n    return {combined}"

    def outcome(self, xs: Sequence[int]) -> Returned:
        """What its code returns."""
        names: dict[str, Any] = {}
        exec(self.code, names)  # noqa: S102  made of the words above, so it needs no sandbox
        try:
            return Returned(names["solve"](xs))
        except ValueError as error:  # the largest of none
            return Returned(None, f"ValueError: {error}")

    def tried(self, rng: random.Random, length: int) -> dict[str, Any]:
        """A list with numbers to keep and others, and what is right for it."""
        kept = Problem(replace(self.template, combined="list"), self.k)
        while True:
            xs = [rng.randint(-20, 20) for _ in range(length)]
            if 1 < len(kept.outcome(xs).value) < length:
                return {"xs": xs, "result": self.outcome(xs).value}

    @property
    def _parts(self) -> list[tuple[str, str]]:
        """English and code of each part."""
        chosen = KEPT[self.template.kept], CHANGED[self.template.changed], COMBINED[self.template.combined]
        return [(words.format(k=self.k), code.format(k=self.k)) for words, code in chosen]
