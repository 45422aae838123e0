"""Small databases: random ones to learn on, and what one on disk is made of."""

import random
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

TABLES = (
    *("box", "ship", "farm", "shop", "club", "team", "road", "port", "mine", "park", "bank", "lab"),
    *("cup", "song", "game", "tree", "bird", "car", "coat", "lamp", "book", "note", "seed", "tool"),
)
NUMBERS = ("size", "price", "age", "speed", "depth", "rank", "cost", "score", "height", "weight", "length", "load")
TEXTS = ("color", "kind", "city", "shape", "style", "mood", "grade", "label", "brand", "taste", "sound", "origin")
WORDS = (
    *("red", "blue", "green", "old", "new", "cold", "warm", "soft", "loud", "east", "west", "north", "south", "iron"),
    *("gold", "salt", "round", "flat", "wild", "calm", "sweet", "dark", "light", "plain", "rough", "dry"),
    *("oak", "silk"),
)
VALUES = range(10, 100, 5)


@dataclass(frozen=True)
class Table:
    """Its key is `<name>_id`, and it refers to each of `parents` by theirs."""

    name: str
    parents: tuple[str, ...]
    number: str
    """A column of whole numbers."""
    text: str
    """A column of words."""

    @property
    def columns(self) -> list[str]:
        return [f"{self.name}_id", *(f"{parent}_id" for parent in self.parents), self.number, self.text]

    def described(self) -> str:
        return f"{self.name}({', '.join(self.columns)})"


Schema = Mapping[str, Table]


def described(schema: Schema) -> str:
    """What an agent is shown of it."""
    return "\n".join(table.described() for table in schema.values())


def paths(schema: Schema, joins: int) -> list[tuple[str, ...]]:
    """Tables that each refer to the next, by so many joins."""
    found: list[tuple[str, ...]] = [(name,) for name in schema]
    for _ in range(joins):
        found = [(*path, parent) for path in found for parent in schema[path[-1]].parents]
    return found


def random_schema(rng: random.Random) -> Schema:
    """Four tables in a line and a fifth that one of them refers to, in any order."""
    names, numbers, texts = (rng.sample(words, 5) for words in (TABLES, NUMBERS, TEXTS))
    parents = [(names[1],), (names[2],), (names[3],), (), ()]
    parents[rng.randrange(3)] += (names[4],)
    tables = [Table(*given) for given in zip(names, parents, numbers, texts, strict=True)]
    rng.shuffle(tables)
    return {table.name: table for table in tables}


def write_random_rows(schema: Schema, rng: random.Random, path: Path) -> None:
    """A new database of this schema: columns have few values, so that questions have answers."""
    sizes = {name: rng.randint(5, 8) if table.parents else rng.randint(3, 6) for name, table in schema.items()}
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for setting in ("page_size = 512", "journal_mode = OFF", "synchronous = OFF"):  # small, and soon written
            connection.execute(f"PRAGMA {setting}")
        for name, table in schema.items():
            words, numbers = rng.sample(WORDS, 3), rng.sample(VALUES, sizes[name])
            connection.execute(f"CREATE TABLE {name} ({', '.join(table.columns)})")
            for key, number in enumerate(numbers, 1):
                parents = [rng.randint(1, sizes[parent]) for parent in table.parents]
                row = [key, *parents, number, rng.choice(words)]
                connection.execute(f"INSERT INTO {name} VALUES ({', '.join('?' * len(row))})", row)


def schema_of(connection: sqlite3.Connection) -> Schema:
    """The schema of a database that was made by the same rules."""
    names = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY rowid").fetchall()
    schema: dict[str, Table] = {}
    for (name,) in names:
        columns = [str(column[1]) for column in connection.execute(f"PRAGMA table_info({name})").fetchall()]
        _, *parents = [column.removesuffix("_id") for column in columns if column.endswith("_id")]
        number, text = (column for column in columns if not column.endswith("_id"))
        schema[name] = Table(name, tuple(parents), number, text)
    return schema
