"""Loading an environment: its tools become schemas, and what its author got wrong is refused in one line at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from agentloop.environments import Environment, Task, load_environment, tool
from agentloop.environments.task_source import EnvironmentTasks
from agentloop.environments.tools.tool_schema import tools_of
from agentloop.errors import UserError
from context.messages import Message

_SOUND = """
import random
from agentloop import Environment, Task, tool
from typing import Any, Literal

class Mine(Environment):
    def __init__(self, limit: int = 9, sizes: tuple[int, int] = (1, 2)) -> None:
        self.limit, self.sizes = limit, sizes

    def make_task(self, rng):
        return Task(f"Say {rng.randint(0, 10**9)}", {"limit": self.limit})

    @tool
    def act(self, x: int) -> str:
        '''Act.'''
        return str(x)

    def reward(self, task, messages):
        return 0.0
"""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.py"
    path.write_text(text, encoding="utf-8")
    return f"{path}:Mine"


def write_changed(tmp_path: Path, old: str, new: str) -> str:
    assert old in _SOUND
    return write(tmp_path, _SOUND.replace(old, new))


def refusal(name: str, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        load_environment(name, options)
    text = str(caught.value)
    assert "\n" not in text
    return text


class Schemas(Environment):
    """Tools documented in the style of Google, and of reST."""

    @tool
    def google(self, name: str, size: int, share: float = 0.5, quick: bool = True, unit: str | None = None) -> str:
        """Do it
        well.

        More for people.

        Args:
            name: What it
                is called.
            size (int): How big: in metres.

        Returns:
            Something.
        """
        return name

    @tool
    def rest(self, rows: list[list[int]], by: dict[str, float], how: Literal["up", "down"], any: list[Any]) -> dict:
        """Sort rows.

        :param rows: The rows,
            all of them.
        :param dict by: Weights.
        :type how: str
        :return: The rows.
        """
        return {}


def test_tool_schema_has_types_defaults_containers_choices_and_descriptions() -> None:
    google, rest = (spec.schema["function"] for spec in tools_of(Schemas).values())
    assert (google["name"], google["description"], rest["description"]) == ("google", "Do it well.", "Sort rows.")
    assert google["parameters"] == {
        "type": "object",
        "properties": {
            "name": {"type": "string", "description": "What it is called."},
            "size": {"type": "integer", "description": "How big: in metres."},
            "share": {"type": "number", "default": 0.5},
            "quick": {"type": "boolean", "default": True},
            "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["name", "size"],
    }
    matrix = {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}
    assert rest["parameters"]["properties"] == {
        "rows": {**matrix, "description": "The rows, all of them."},
        "by": {"type": "object", "additionalProperties": {"type": "number"}, "description": "Weights."},
        "how": {"type": "string", "enum": ["up", "down"]},
        "any": {"type": "array", "items": {}},
    }
    # Chat templates print it as it is.
    size = json.dumps(google["parameters"]["properties"]["size"])
    assert size == '{"type": "integer", "description": "How big: in metres."}'


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("        '''Act.'''\n", "", ".act must have a docstring"),
        ("'''Act.'''", "'''Act.\n\n        Args:\n            y: It.'''", "got 'y' in its docstring. There is x."),
        ("'''Act.'''", "'''Act.\n\n        : : x: It.'''", ".act must have a docstring in the style of Google, reST"),
        ("x: int)", "x)", ".act must annotate its argument 'x' with a type JSON has, got no type."),
        ("x: int)", "x: bytes)", ".act must annotate its argument 'x' with a type JSON has, got bytes."),
        ("x: int)", "*x: int)", ".act must take named arguments only, got '*x: int'."),
        ("self, x: int)", "x: int)", ".act must take self first, got (x: int)"),
        (") -> str:", "):", ".act must say that it returns what JSON has, got -> no type. Use -> str"),
        (") -> str:", ") -> bytes:", ".act must say that it returns what JSON has, got -> bytes."),
        ("    @tool\n    def act", "    @tool(isolated=True)\n    async def act", "must be plain to be isolated"),
        ("return ", "yield ", ".act must return its result, got one that yields"),
        ("    def act", "    @staticmethod\n    def act", ".act must be a plain method to be a tool, got a"),
        ("    def act", "    def äct", ".äct must be named in at most 64 of A-Z"),
        ("x: int)", "x: float = float('nan'))", ".act must have defaults JSON has, got nan for 'x'."),
        ("    def make_task", "    def make_tasks", ":Mine must define make_task, got none. Write def make_task("),
        ("return 0.0", "return None", ".reward must return a finite number, got None for the task"),
        ("return Task(", "return (", ".make_task must return a Task, got tuple."),
        ("{rng.randint", "{random.randint", ".make_task must make the same task from the same rng"),
        ('{"limit": self.limit}', '{"limit": {1}}', "whose payload and messages have a JSON form, got TypeError"),
        ('f"Say {rng', '["x"] and f"Say {no', ".make_task must make a task, got NameError: name 'no'"),
        ("    def make_task", "    version = 2\n    def make_task", ":Mine.version must be text, got 2."),
        ("    def make_task", "    def start(self, task):\n        task.x\n    def make_task", ".start must accept"),
        ("class Mine(Environment)", "class Mine", ":Mine must be a subclass of agentloop.environments.Environment"),
    ],
)  # fmt: skip
def test_mistake_of_an_author_is_refused_at_once(tmp_path: Path, old: str, new: str, message: str) -> None:
    name = write_changed(tmp_path, old, new)
    text = refusal(name)
    assert message in text
    assert text.startswith(name)


def test_option_that_does_not_fit_is_refused_at_once(tmp_path: Path) -> None:
    name = write(tmp_path, _SOUND)
    unknown = f"environment.options must be arguments of {name}, got 'limits'. Did you mean limit?"
    assert refusal(name, limits=1).startswith(unknown)
    assert refusal(name, limit="many").startswith("environment.options.limit must be int, got 'many'.")
    assert vars(load_environment(name, {"sizes": [3, 4]}).create()) == {"limit": 9, "sizes": (3, 4)}
    name = write_changed(tmp_path, "limit: int = 9", "limit: int")
    assert refusal(name) == f"environment.options must give 'limit', which {name} asks for, got none."


def test_environment_that_can_not_be_found_is_refused_with_the_nearest(tmp_path: Path) -> None:
    name = write(tmp_path, _SOUND)
    assert refusal("lookup_chian").endswith("got 'lookup_chian'. Did you mean lookup_chain?")
    assert "must name a file that exists, got 'gone.py'. Looked for /" in refusal("gone.py:Mine")
    assert refusal(name.replace(":Mine", ":Mien")).endswith("got 'Mien'. Did you mean Mine?")
    assert "must have the form path/to/file.py:NAME of a class, got 'mine:Mine'" in refusal("mine:Mine")


def test_file_may_import_its_neighbours_and_use_postponed_annotations(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text("LIMIT = 3", encoding="utf-8")
    more = "\nclass Base(Mine): pass\nclass Mine(Base):\n    @tool\n    def more(self) -> None:\n        '''More.'''\n"
    text = "from __future__ import annotations\nfrom neighbour_of_mine import LIMIT\n" + _SOUND + more
    loaded = load_environment(write(tmp_path, text), {})
    assert loaded.name == "mine.py:Mine"
    assert [schema["function"]["name"] for schema in loaded.tools] == ["act", "more"]  # those of a base class too


def hashes(source: EnvironmentTasks, start: int, stop: int) -> list[str]:
    factory = load_environment("lookup_chain", {})
    return [factory.task_hash(source.train(index)) for index in range(start, stop)]


def source(pool: Any, seed: int = 7) -> EnvironmentTasks:
    return EnvironmentTasks(load_environment("lookup_chain", {}), seed=seed, pool=pool)


def test_task_pool_is_gone_through_once_per_epoch_in_a_new_order() -> None:
    tasks = source(5)
    second, first = hashes(tasks, 5, 10), hashes(tasks, 0, 5)
    assert hashes(source(5), 0, 10) == [*first, *second]  # whatever was asked before
    assert len(set(first)) == 5
    assert set(first) == set(second)
    assert first != second


def test_unlimited_and_held_out_tasks_are_all_new_and_depend_on_the_seed_alone() -> None:
    factory, tasks = load_environment("lookup_chain", {}), hashes(source("unlimited"), 0, 50)
    assert len(set(tasks)) == 50
    assert set(tasks).isdisjoint(hashes(source("unlimited", seed=8), 0, 50))
    held_out = [factory.task_hash(task) for task in source("unlimited").held_out(30)]
    assert len(set(held_out)) == 30
    assert set(held_out).isdisjoint([*tasks, *hashes(source(5), 0, 5)])
    assert held_out[:10] == [factory.task_hash(task) for task in source(5).held_out(10)]
    # Written out once: neither hash() nor the order of a set may decide.
    task = source(5).train(3)
    assert (task.payload["key"], task.payload["code"], task.payload["hops"]) == ("boat", "71", 4)


def test_task_messages_are_never_written_by_the_policy() -> None:
    prompt = tuple(Message(role, "x", author="llm") for role in ("system", "user", "assistant"))
    assert [message.author for message in Task(prompt).messages()] == ["initialization", "user", "initialization"]
