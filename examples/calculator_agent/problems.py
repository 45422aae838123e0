"""Word problems in English, each with the sum that solves it."""

import random
from collections.abc import Callable
from dataclasses import dataclass

NAMES = ("Anna", "Ben", "Carla", "David", "Elena", "Farid", "Grace", "Hugo", "Ivy", "Jonas", "Kavya", "Liam")
THINGS = ("apples", "books", "marbles", "stamps", "pencils", "shells", "coins", "cards", "tickets", "cookies")


@dataclass(frozen=True)
class Problem:
    kind: str
    english: str
    sum: str
    """What a calculator is to be asked, as numbers and + - * / and brackets."""
    answer: int


@dataclass(frozen=True)
class Kind:
    """A kind of problem: its words with places for numbers, its sum, and how large the numbers are."""

    name: str
    english: tuple[str, ...]
    sum: str
    numbers: dict[str, tuple[int, int]]
    fits: Callable[[dict[str, int]], bool] = lambda numbers: True
    """Whether the answer to these numbers is a whole one that makes sense."""

    def problem(self, rng: random.Random) -> Problem:
        name, other = rng.sample(NAMES, 2)
        words = {"name": name, "other": other, "things": rng.choice(THINGS)}
        while True:
            numbers = {letter: rng.randint(*bounds) for letter, bounds in self.numbers.items()}
            asked = self.sum.format(**numbers)
            answer = eval(asked)  # noqa: S307  made of the numbers and signs below
            if answer == int(answer) and answer > 0 and self.fits(numbers):
                return Problem(self.name, rng.choice(self.english).format(**words, **numbers), asked, int(answer))


SMALL, MIDDLE, LARGE = (2, 9), (11, 99), (101, 999)

TRAINED = (
    Kind(
        "sum",
        (
            "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
            "{name} has {a} {things} and {other} has {b}. How many {things} do they have together?",
        ),
        "{a} + {b}",
        {"a": LARGE, "b": LARGE},
    ),
    Kind(
        "difference",
        (
            "{name} has {a} {things} and gives {b} to {other}. How many {things} are left?",
            "{name} has {a} {things}, {other} has {b}. How many more has {name}?",
        ),
        "{a} - {b}",
        {"a": LARGE, "b": MIDDLE},
    ),
    Kind(
        "product",
        (
            "There are {a} boxes with {b} {things} in each. How many {things} are there?",
            "{name} saves {b} {things} a day. How many are that after {a} days?",
        ),
        "{a} * {b}",
        {"a": MIDDLE, "b": MIDDLE},
    ),
    Kind(
        "share",
        (
            "{a} {things} are shared equally among {b} children. How many {things} does each child get?",
            "{name} puts {a} {things} into {b} equal bags. How many {things} are in a bag?",
        ),
        "{a} / {b}",
        {"a": LARGE, "b": SMALL},
    ),
    Kind(
        "sum_less",
        (
            "{name} has {a} {things}, finds {b} more and loses {c}. How many {things} does {name} have now?",
            "A bus has {a} passengers. {b} get on and {c} get off. How many are on the bus?",
        ),
        "{a} + {b} - {c}",
        {"a": MIDDLE, "b": MIDDLE, "c": MIDDLE},
    ),
    Kind(
        "boxes_and_more",
        (
            "{name} has {a} boxes with {b} {things} each, and {c} more {things}. How many {things} is that?",
            "{name} reads {b} pages a day for {a} days, and then {c} pages. How many pages is that?",
        ),
        "{a} * {b} + {c}",
        {"a": SMALL, "b": MIDDLE, "c": MIDDLE},
    ),
    Kind(
        "boxes_less",
        (
            "{name} has {a} boxes with {b} {things} each and gives {c} {things} away. How many {things} are left?",
            "{a} trays hold {b} {things} each. {c} {things} are broken. How many are whole?",
        ),
        "{a} * {b} - {c}",
        {"a": SMALL, "b": MIDDLE, "c": MIDDLE},
    ),
    Kind(
        "two_kinds",
        (
            "A pen costs {b} cents and a ruler {d} cents. How much are {a} pens and {c} rulers?",
            "A car goes {b} km an hour for {a} hours, then {d} km an hour for {c} hours. How far does it go?",
        ),
        "{a} * {b} + {c} * {d}",
        {"a": SMALL, "b": MIDDLE, "c": SMALL, "d": MIDDLE},
    ),
    Kind(
        "share_of_sum",
        (
            "{name} has {a} {things} and {other} has {b}. They share them equally among {c} friends. "
            "How many {things} does each friend get?",
        ),
        "({a} + {b}) / {c}",
        {"a": MIDDLE, "b": MIDDLE, "c": SMALL},
    ),
    Kind(
        "share_and_more",
        (
            "{a} {things} are shared equally among {b} children. {name}, one of them, has {c} already. "
            "How many {things} does {name} have now?",
        ),
        "{a} / {b} + {c}",
        {"a": LARGE, "b": SMALL, "c": MIDDLE},
    ),
    Kind(
        "sums_in_boxes",
        ("Each of {c} bags holds {a} red and {b} blue {things}. How many {things} are there?",),
        "({a} + {b}) * {c}",
        {"a": MIDDLE, "b": MIDDLE, "c": SMALL},
    ),
    Kind(
        "percent",
        (
            "{a} people come to a fair, and {b} percent of them are children. How many children come?",
            "{name} has {a} {things}. {b} percent of them are red. How many {things} are red?",
        ),
        "{a} * {b} / 100",
        {"a": LARGE, "b": MIDDLE},
    ),
)
HELD_OUT = (
    Kind(
        "seats",
        (
            "A hall has {a} rows of {b} seats, and {c} seats on the balcony. How many seats are there?",
            "{name} plants {a} rows of {b} trees, and {c} trees along the road. How many trees is that?",
        ),
        "{a} * {b} + {c}",
        {"a": SMALL, "b": MIDDLE, "c": MIDDLE},
    ),
    Kind(
        "library",
        (
            "A library has {a} books, gets {b} new ones and lends {c}. How many books are there now?",
            "A farmer has {a} sheep, {b} lambs are born and {c} sheep are sold. How many has the farmer now?",
        ),
        "{a} + {b} - {c}",
        {"a": MIDDLE, "b": MIDDLE, "c": MIDDLE},
    ),
    Kind(
        "rope",
        (
            "A rope of {a} metres is cut into {b} equal pieces. How many metres long is a piece?",
            "{name} reads a book of {a} pages in {b} days, as many every day. How many pages are that a day?",
        ),
        "{a} / {b}",
        {"a": LARGE, "b": SMALL},
    ),
    Kind(
        "teams",
        ("{a} boys and {b} girls make {c} equal teams. How many children are in a team?",),
        "({a} + {b}) / {c}",
        {"a": MIDDLE, "b": MIDDLE, "c": SMALL},
    ),
)
"""Situations that nothing is learned on; their sums have the form of trained ones."""
