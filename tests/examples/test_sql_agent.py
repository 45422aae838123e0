"""The SQL agent's questions are answered by their queries, and judged by rows; none that it is judged by is learned."""

import random
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from agentloop import Message, Task, ToolCall
from examples.sql_agent.make_data import HARBOUR, SqlAgent, held_out_questions, new_questions, row
from examples.sql_agent.questions import ASKED, CONDITIONS, HELD_OUT, JOINS, TRAINED, Question, Template
from examples.sql_agent.schemas import Table, random_schema, schema_of

BOX, SHIP, PORT = (
    Table("box", ("ship",), "weight", "label"),
    Table("ship", ("port",), "length", "color"),
    Table("port", (), "depth", "origin"),
)


Asked = list[tuple[Question, Task]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("databases")


@pytest.fixture(scope="module")
def asked(folder: Path) -> Asked:
    """A few of those to train on, and those to be judged by."""
    rng, agent = random.Random(3), SqlAgent(str(folder))
    made = [*new_questions(30, folder, rng), *held_out_questions(folder, rng)]
    return [(question, agent.task_from_row(row(question, schema, path))) for question, schema, path in made]


def reward(folder: Path, task: Task, queries: Sequence[str], answer: str = SqlAgent.DONE) -> float:
    agent = SqlAgent(str(folder))
    agent.start(task)
    replies = [Message("assistant", "", tool_calls=(ToolCall("run_sql", {"query": query}),)) for query in queries]
    return agent.reward(task, [*task.messages(), *replies, Message("assistant", answer)])


def test_rows_of_the_harbour_are_those_counted_by_hand() -> None:
    question = Question(Template("list", "equals", 1), [SHIP, PORT], "west", 0)
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(HARBOUR.read_text(encoding="utf-8"))
        assert connection.execute(question.query()).fetchall() == [(60,)]  # ship 9 is the one of port 3


def test_the_right_query_succeeds_and_no_other_comparison_or_function(folder: Path, asked: Asked) -> None:
    for question, task in asked:
        assert reward(folder, task, [question.query()]) == 1.0
        assert reward(folder, task, ["SELECT oops", question.query()]) == 1.0
        wrong = [question.query(asked=name) for name in ASKED if name != question.template.asked]
        wrong += [question.query(condition=name) for name in CONDITIONS if name != question.template.condition]
        assert [reward(folder, task, [query]) for query in wrong] == [0.0] * len(wrong)


def test_what_is_no_answer_has_no_reward(folder: Path, asked: Asked) -> None:
    question, task = asked[0]
    assert reward(folder, task, []) == 0.0
    assert reward(folder, task, [question.query()], answer="It is 4.") == 0.0
    assert reward(folder, task, [question.query(), "DROP TABLE box"]) == 0.0
    assert reward(folder, task, [question.query() + " AND 0"]) == 0.0


def test_no_template_and_no_schema_is_both_learned_and_judged_by(asked: Asked) -> None:
    assert not set(TRAINED) & set(HELD_OUT)
    for name, parts in (("asked", ASKED), ("condition", CONDITIONS), ("joins", JOINS)):
        assert {getattr(template, name) for template in TRAINED} == set(parts)
        assert {getattr(template, name) for template in HELD_OUT} == set(parts)
    judged = [question for question, task in asked if task.payload["database"] == "harbour.sqlite"]
    trained = [question for question, task in asked if task.payload["database"] != "harbour.sqlite"]
    assert {question.template for question in judged} <= set(HELD_OUT)
    assert {question.template for question in trained} <= set(TRAINED)
    rng = random.Random(5)
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(HARBOUR.read_text(encoding="utf-8"))
        harbour = set(schema_of(connection).values())
    assert all(len(harbour & set(random_schema(rng).values())) <= 1 for _ in range(1000))
