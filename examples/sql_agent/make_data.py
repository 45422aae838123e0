"""Writes what the SQL agent learns from and is judged by: demonstrations, questions, and their databases."""

import argparse
import random
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from agentloop.user_code import load_class
from examples.chat_rows import demonstration, or_other, write_lines
from examples.sql_agent.questions import ASKED, CONDITIONS, HELD_OUT, TRAINED, Question, ask
from examples.sql_agent.schemas import Schema, described, random_schema, schema_of, write_random_rows

WRONG_KEY = 0.1
"""How often a demonstration's first query joins by a key that there is not: it reads the error, and tries again."""
HELD_OUT_QUESTIONS = 128
HARBOUR = Path(__file__).with_name("harbour.sql")
SqlAgent = load_class(f"{Path(__file__).with_name('agent.py')}:SqlAgent", what="environment.name")  # as a run loads it

Asked = tuple[Question, Schema, Path]
"""A question, what its database looks like, and where that is."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/sql_agent"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demonstrations", type=int, default=5000, help="each on a database of its own")
    parser.add_argument("--tasks", type=int, default=1000, help="questions to train on, likewise")
    given = parser.parse_args()
    databases = given.folder / "databases"
    databases.mkdir(parents=True, exist_ok=True)
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as passing:
        asked = new_questions(given.demonstrations, Path(passing), rng)
        write_lines(given.folder / "demonstrations.jsonl", (demonstrated(*each, rng) for each in asked))
    write_lines(given.folder / "train.jsonl", (row(*each) for each in new_questions(given.tasks, databases, rng)))
    write_lines(given.folder / "test.jsonl", (row(*each) for each in held_out_questions(databases, rng)))


def new_questions(count: int, databases: Path, rng: random.Random) -> Iterator[Asked]:
    """Of templates that are trained on, each on a random database of its own."""
    for number in range(count):
        question = None
        while question is None:
            schema, path = random_schema(rng), databases / f"{number:05d}.sqlite"
            write_random_rows(schema, rng, path)
            with closing(sqlite3.connect(path)) as connection:
                question = ask(rng.choice(TRAINED), schema, connection, rng)
        yield question, schema, path


def held_out_questions(databases: Path, rng: random.Random) -> Iterator[Asked]:
    """Different ones of templates that nothing is learned on, on a database that nothing is learned on."""
    path, seen = databases / "harbour.sqlite", set[str]()
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(HARBOUR.read_text(encoding="utf-8"))
        schema = schema_of(connection)
        while len(seen) < HELD_OUT_QUESTIONS:
            question = ask(rng.choice(HELD_OUT), schema, connection, rng)
            if question is not None and question.english not in seen:
                seen.add(question.english)
                yield question, schema, path


def row(question: Question, schema: Schema, path: Path) -> dict[str, str]:
    return {"question": f"{described(schema)}\n{question.english}", "database": path.name, "sql": question.query()}


def demonstrated(question: Question, schema: Schema, path: Path, rng: random.Random) -> dict[str, Any]:
    agent = SqlAgent(str(path.parent))
    task = agent.task_from_row(row(question, schema, path))
    agent.start(task)
    calls = [({"query": query}, agent.run_sql(query)) for query in _queries(question, schema, rng)]
    return demonstration(SqlAgent, task, calls, answer=SqlAgent.DONE)


def _queries(question: Question, schema: Schema, rng: random.Random) -> Iterator[str]:
    """What a careless colleague would have run."""
    asked = or_other(question.template.asked, ASKED, rng)
    condition = or_other(question.template.condition, CONDITIONS, rng)
    if rng.random() < WRONG_KEY:
        wrong = rng.choice([name for name, table in schema.items() if table not in question.path[:2]])
        yield question.query(asked=asked, condition=condition, first_key=wrong)
    yield question.query(asked=asked, condition=condition)


if __name__ == "__main__":
    main()
