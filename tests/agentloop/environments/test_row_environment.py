"""Rows as tasks without a class, and functions as their tools."""

import datetime
import json
import re
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from agentloop.config.config_file import load_plain
from agentloop.environments import EnvironmentFactory, load_environment, open_tasks
from agentloop.environments.row_environment import RowEnvironment
from agentloop.errors import UserError
from agentloop.user_code import give_function
from context.messages import Message
from tests.fakes.environments import functions
from tests.fakes.environments.faulty_tools import ask

FILE = Path(functions.__file__)
ROW = {"prompt": "What is in the box?", "store": {"box": "a hat"}}


def loaded(*names: str) -> EnvironmentFactory:
    return load_environment("rows", {}, row=ROW, tools=[f"{FILE}:{name}" for name in names])


def answer(factory: EnvironmentFactory, name: str, **arguments: object) -> str:
    assert factory.example is not None
    environment = factory.create()
    environment.start(factory.example)
    return ask(environment, name, **arguments).content


def test_functions_are_called_like_methods_and_those_that_ask_for_the_task_are_given_it() -> None:
    factory = loaded("look")
    assert list(factory.tools[0]["function"]["parameters"]["properties"]) == ["key"]
    assert answer(factory, "look", key="box") == "a hat"
    assert answer(factory.answered_by(lambda *_: "Go on."), "look", key="box") == "a hat"
    assert answer(factory, "look", key="hat") == '{"error": "KeyError: \'hat\'"}'
    assert "look has no argument 'task'" in answer(factory, "look", key="box", task={})
    assert loaded("look_again").has_deterministic_tools and not factory.has_deterministic_tools
    factory = loaded("add", "later", "look_again", "start")
    assert answer(factory, "add", a=1) == "3"
    assert answer(factory, "later", text="so") == "so"
    assert answer(factory, "start", a=1) == "1"  # it hides no method of the environment
    assert answer(factory, "look_again", key="box") == "a hat"


def test_annotated_argument_keeps_its_bound_and_its_description() -> None:
    factory = loaded("bounded")
    (shown,) = factory.tools[0]["function"]["parameters"]["properties"].values()
    assert shown == {"type": "integer", "minimum": 1, "description": "How many.", "default": 3}
    assert answer(factory, "bounded", top=2) == "2"
    assert "greater than or equal to 1" in answer(factory, "bounded", top=-5)


def test_source_is_that_of_the_files_of_functions(tmp_path: Path) -> None:
    mine, judge = tmp_path / "mine.py", tmp_path / "judge.py"
    mine.write_text('def act(a: int) -> int:\n    """Act."""\n    return a\n')
    judge.write_text("def right(episode):\n    return 1.0\n")

    def source(*judges: str) -> str:
        return load_environment("rows", {}, row=ROW, tools=[f"{mine}:act"], judges=judges).source

    def agents_source() -> str:
        return load_environment("agent", {"agent": f"{judge}:right"}, row=ROW).source

    digests, as_agent = [source(), source(f"{judge}:right")], agents_source()
    for file in (mine, judge):
        file.write_text(file.read_text() + "# more\n")
        digests.append(source(f"{judge}:right"))
    assert len(set(digests)) == 4
    assert source(f"{judge}:right") == digests[-1]
    assert agents_source() != as_agent
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({**ROW, "number": number}) + "\n" for number in range(30)))
    given = {"environment": {"name": "rows", "tools": [f"{mine}:act"]}, "tasks": {"data": str(rows)}}
    config = load_plain({**given, "reward": {"functions": [f"{judge}:right"]}})
    with pytest.raises(UserError, match=f"^environment must have .* got {mine} or {judge} changed since .*--env"):
        open_tasks(config, ("another",))
    config = load_plain({**given, "environment": {"agent": f"{judge}:right"}})
    with pytest.raises(UserError, match=f"^environment must have .* got {judge} changed since "):
        open_tasks(config, ("another",))


def test_functions_named_alike_that_a_process_is_given_stay_apart() -> None:
    def made(prefix: str) -> str:
        def look(key: str) -> str:
            """Look."""
            return prefix + key

        return give_function(look, what="tools")

    first, second = (load_environment("rows", {}, row=ROW, tools=[made(prefix)]) for prefix in ("one ", "two "))
    assert (answer(first, "look", key="box"), answer(second, "look", key="box")) == ("one box", "two box")
    assert first.source != second.source


class Color(Enum):
    RED, BLUE = "red", "blue"


class Shop:
    """Say what it was called with."""

    def mix(self, color: Color, at: tuple[str, int], also: Any = None, then: list[Color] | None = None):  # type: ignore[no-untyped-def]
        """Mix colours."""
        return color if also is None else [color.value, at, then and then[0].name]

    async def __call__(self, key: str, *, more: int = 1):  # type: ignore[no-untyped-def]
        return key * more


def test_tools_are_methods_partials_and_objects_with_whatever_types_have_a_form_in_json() -> None:
    given = [Shop().mix, partial(Shop(), more=2), cache(functions.add)]
    factory = load_environment("rows", {}, row=ROW, tools=[give_function(one, what="tools") for one in given])
    mix, shop, add = (tool["function"] for tool in factory.tools)
    colors = {"enum": ["red", "blue"], "type": "string"}
    pair = [{"type": "string"}, {"type": "integer"}]
    assert mix["parameters"]["properties"] == {
        "color": colors,
        "at": {"type": "array", "prefixItems": pair, "minItems": 2, "maxItems": 2},
        "also": {},
        "then": {"anyOf": [{"type": "array", "items": colors}, {"type": "null"}]},
    }
    assert (shop["name"], shop["description"]) == ("Shop", "Say what it was called with.")
    assert list(shop["parameters"]["properties"]) == ["key"] and add["name"] == "add"
    renamed = partial(Shop(), more=3)
    renamed.__name__ = "thrice"  # type: ignore[attr-defined]
    tools = [give_function(one, what="tools") for one in (given[1], renamed)]
    both = load_environment("rows", {}, row=ROW, tools=tools).tools
    assert [tool["function"]["name"] for tool in both] == ["Shop", "thrice"]
    assert answer(factory, "mix", color="red", at=["a", 1]) == "red"
    assert answer(factory, "mix", color="red", at=["a", 1], also={}, then=["blue"]) == '["red", ["a", 1], "BLUE"]'
    assert "argument 'color': Input should be 'red' or 'blue'" in answer(factory, "mix", color="green", at=["a", 1])
    assert "argument 'at': Input should be a valid integer" in answer(factory, "mix", color="red", at=["a", "1"])
    assert (answer(factory, "Shop", key="a"), answer(factory, "add", a=1)) == ("aa", "3")


def test_prompt_of_a_row_may_be_text_or_messages_and_its_values_dates_and_bytes() -> None:
    task = RowEnvironment().task_from_row({"prompt": "When?", "on": datetime.date(2026, 1, 31), "key": b"\x01\xff"})
    assert task.messages() == (Message("user", "When?", author="user"),)
    assert task.payload == {"prompt": "When?", "on": "2026-01-31", "key": "01ff"}
    said = [{"role": "assistant", "content": "Well?"}, {"role": "user", "content": "Why?", "name": None}]
    factory = load_environment("rows", {"prompt": "said", "system": "Be brief."}, row={"said": said})
    assert factory.example is not None
    assert factory.example.messages() == (
        Message("system", "Be brief.", author="initialization"),
        Message("assistant", "Well?", author="initialization"),
        Message("user", "Why?", author="user"),
    )


def with_agent(agent: str, **options: Any) -> dict[str, Any]:
    return {"name": "agent", "options": {"agent": agent, **options}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tools": [f"{FILE}:undocumented"]}, "must have a docstring that says what the tool does, got none."),
        ({"tools": [f"{FILE}:add"] * 2}, f"got {FILE}:add, named like another one. Rename it."),
        ({"tools": [f"{FILE}:ad"]}, f"environment.tools must name a function of {FILE}, got 'ad'. Did you mean add?"),
        (with_agent("none.py:solve"), "environment.agent must name a file that exists, got 'none.py'."),
        (with_agent(f"{FILE}:right", sandbox="bubblewrap"), "sandbox must be none for a function, which runs in this "),
        (with_agent("ls", limits={"processes": 9}), "sandbox must be bubblewrap for limits and read to hold, got none"),
        (with_agent(f"{FILE}:none"), f"environment.agent must name a function of {FILE}, got 'none'."),
        (with_agent("python 'x"), 'environment.agent must be a command with its quotes closed, got "python \'x".'),
        ({"row": {"promt": "Why?", "answer": "2"}}, "got 'prompt' for one of tasks.data with 'promt', 'answer'. Did"),
        ({"row": {"prompt": 7}}, "must be a text or a list of messages with a role (system, user, assistant), a cont"),
        (
            {"row": {"prompt": [{"role": "tool", "content": "2"}]}},
            "got {'role': 'tool', 'content': '2'} in the first row to train on.",
        ),
        ({"row": {"prompt": [{"role": "user", "content": "x", "name": "Emil"}]}}, "and nothing else, got {'role': 'us"),
    ],
)
def test_tools_agents_and_rows_that_do_not_fit_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        load_environment(**{"name": "rows", "options": {}, "row": ROW, **given})
