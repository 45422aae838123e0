"""Questions of several joins in English, each with the query that answers it."""

import random
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from examples.sql_agent.schemas import Schema, Table, paths

ASKED = {
    "max": ("the largest {number}", "max({number})"),
    "min": ("the smallest {number}", "min({number})"),
    "avg": ("the average {number}", "avg({number})"),
    "sum": ("the total {number}", "sum({number})"),
    "count": ("the count of {number}", "count({number})"),
    "list": ("every {number}", "{number}"),
    "distinct": ("every different {text}", "distinct {text}"),
}
"""What a question asks for, in English and in SQL."""
CONDITIONS = {
    "equals": ("{text} equals {word}", "{text} = '{word}'"),
    "differs": ("{text} differs from {word}", "{text} != '{word}'"),
    "exceeds": ("{number} exceeds {bound}", "{number} > {bound}"),
    "falls_below": ("{number} falls below {bound}", "{number} < {bound}"),
}
JOINS = (1, 2, 3)
_TRIES = 20


@dataclass(frozen=True)
class Template:
    """What stays the same of a question in whatever database."""

    asked: str
    condition: str
    joins: int


_ALL = [Template(*parts) for parts in product(ASKED, CONDITIONS, JOINS)]


def _is_held_out(template: Template) -> bool:
    """A quarter: each asks for, compares and joins what others do, and no other does all three."""
    parts = (template.asked, ASKED), (template.condition, CONDITIONS), (template.joins, JOINS)
    return sum([*names].index(name) for name, names in parts) % 4 == 0


HELD_OUT = tuple(template for template in _ALL if _is_held_out(template))
TRAINED = tuple(template for template in _ALL if not _is_held_out(template))


@dataclass(frozen=True)
class Question:
    template: Template
    path: Sequence[Table]
    """From the table that is asked about to the one that decides."""
    word: str
    bound: int
    """What the last table's columns are compared with."""

    @property
    def english(self) -> str:
        asked, condition = ASKED[self.template.asked][0], CONDITIONS[self.template.condition][0]
        tables = " in ".join(table.name for table in self.path)
        return f"What is {self._asked(asked)} of {tables} where {self._condition(condition)}?"

    def query(self, *, asked: str = "", condition: str = "", first_key: str = "") -> str:
        """The right query, or one that asks, compares or joins otherwise."""
        what = self._asked(ASKED[asked or self.template.asked][1])
        where = self._condition(CONDITIONS[condition or self.template.condition][1])
        first, *others = (table.name for table in self.path)
        keys = [first_key or others[0], *others[1:]]
        joined = " ".join(f"JOIN {name} USING ({key}_id)" for name, key in zip(others, keys, strict=True))
        return f"SELECT {what} FROM {first} {joined} WHERE {where}"

    def _asked(self, form: str) -> str:
        return form.format(number=self.path[0].number, text=self.path[0].text)

    def _condition(self, form: str) -> str:
        return form.format(number=self.path[-1].number, text=self.path[-1].text, word=self.word, bound=self.bound)


def ask(template: Template, schema: Schema, connection: sqlite3.Connection, rng: random.Random) -> Question | None:
    """A question of this template whose answer no other function or comparison gives; None where none was found."""
    for _ in range(_TRIES):
        path = [schema[name] for name in rng.choice(paths(schema, template.joins))]
        last = path[-1]
        rows = connection.execute(f"SELECT {last.text}, {last.number} FROM {last.name}").fetchall()
        question = Question(template, path, rng.choice(rows)[0], rng.choice(rows)[1])
        if _is_telling(question, connection):
            return question
    return None


def _is_telling(question: Question, connection: sqlite3.Connection) -> bool:
    def rows(query: str) -> list[tuple[object, ...]]:
        return sorted(connection.execute(query).fetchall(), key=str)

    right = rows(question.query())
    others = [question.query(asked=other) for other in ASKED if other != question.template.asked]
    others += [question.query(condition=other) for other in CONDITIONS if other != question.template.condition]
    return bool(right) and right[0][0] is not None and all(rows(other) != right for other in others)
