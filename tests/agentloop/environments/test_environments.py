"""Loading an environment: its tools become schemas, and what its author got wrong is refused in one line at once."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from agentloop.analysis.stored_policies import evaluate_run
from agentloop.config.config_file import load_config, load_plain
from agentloop.environments import Environment, Task, load_environment, open_tasks, tool
from agentloop.environments.factory import source_digest
from agentloop.environments.task_source import EnvironmentTasks
from agentloop.environments.tools.tool_schema import tools_of
from agentloop.errors import UserError
from agentloop.runs.run_folder import open_run_folder
from agentloop.training.train import train
from context.messages import Message
from tests.fakes.refusals import refusal_of
from tests.fakes.runs import PARITY, SilentDisplay, StopAfter, rows, save_qwen2, small_config

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
    return refusal_of(load_environment, name, options)


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
        ("x: int)", "x: type)", ".act must annotate its argument 'x' with a type JSON has, got type."),
        ("x: int)", "*x: int)", ".act must take named arguments only, got '*x: int'."),
        ("self, x: int)", "x: int)", ".act must take self first, got (x: int)"),
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
    assert "must have the form path/to/file.py:NAME, got 'mine:Mine'" in refusal("mine:Mine")


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
    assert hashes(source(5), 0, 10) == [*first, *second]  # the order of questions does not matter
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
    # These values are written out, because neither hash() nor the order of a set may change a task.
    task = source(5).train(3)
    assert (task.payload["key"], task.payload["code"], task.payload["hops"]) == ("boat", "71", 4)


def test_task_messages_are_never_written_by_the_policy() -> None:
    prompt = tuple(Message(role, "x", author="llm") for role in ("system", "user", "assistant"))
    assert [message.author for message in Task(prompt).messages()] == ["initialization", "user", "initialization"]


# Several environments in one run: each task names its own, and errors name the right one


THREE: dict[str, Any] = {
    "easy": {"share": 0.5, "options": {"hops": [1, 2]}},
    "hard": {"share": 0.3, "options": {"hops": [3, 3]}},
    "parity": {"share": 0.2, "name": PARITY, "task_pool": 5},
}


def opened(environments: dict[str, Any] = THREE) -> Any:
    return open_tasks(load_plain({"environments": environments}, source="test"))


def test_tasks_and_held_out_tasks_go_round_and_say_which_environment_they_are_of() -> None:
    environments, source = opened()
    tasks = [source.train(number) for number in range(6)]
    assert [task.environment for task in tasks] == ["easy", "hard", "parity"] * 2
    factories = [environments.factory_for(task) for task in tasks[:3]]
    assert [factory.name for factory in factories] == ["easy", "hard", "parity"]
    assert [factory.options.get("hops") for factory in factories] == [(1, 2), (3, 3), None]
    hashes = {environments.task_hash(task) for task in tasks}
    assert hashes == {factory.task_hash(task) for factory, task in zip(factories * 2, tasks, strict=True)}

    # Each makes the tasks that it makes alone.
    _, alone = opened({"hard": THREE["hard"]})
    assert [source.train(number * 3 + 1) for number in range(3)] == [alone.train(number) for number in range(3)]
    held_out = source.held_out(7)
    assert [task.environment for task in held_out] == [*["easy", "hard", "parity"] * 2, "easy"]
    assert source.held_out(4) == held_out[:4]


def test_source_covers_each_and_a_row_is_of_the_one_of_its_name_and_version() -> None:
    environments, _ = opened()
    assert environments.source != opened({"easy": THREE["easy"]})[0].source
    assert environments.recorded("hard", "1") is environments.factory_for(Task("", environment="hard"))
    assert environments.recorded("hard", "2") is None
    assert environments.recorded("lookup_chain", "1") is None
    changed = environments.with_version_of("abcdef0123")
    assert {factory.version for factory in changed.all} == {"1+abcdef01"}


NOTES = "environment: {mcp_servers: {notes: %s}}"
MCP = "environment.mcp_servers.notes"


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        (NOTES % "{command: [python], url: 'http://x'}", f"{MCP} must have either command or url, got both."),
        (NOTES % "{}", f"{MCP} must have either command or url, got neither."),
        (NOTES % "{url: 'ftp://x'}", f"{MCP}.url must match pattern '^https?://[^@]+$', got 'ftp://x'."),
        (NOTES % "{url: 'http://x', env: {A: b}}", f"{MCP} must not have env, which belongs to command, got it."),
        ("environments: {a: {share: 1, tasks: {split: x}}}", "environments.a.tasks.split must be left at null when "),
        ("environments: {a: {share: 1, name: rows}}", "environments.a.tasks.data must be given when environments.a.na"),
        ("environments: {a b: {share: 1}}", "environments.a b must match pattern '^[A-Za-z0-9_-]{1,64}$', got 'a b'."),
    ],
)
def test_setting_that_is_wrong_is_named_with_its_line(tmp_path: Path, section: str, problem: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"run: {{seed: 1}}\n{section}\n")
    assert refusal_of(load_config, file).startswith(f"{file}:2: {problem}")


# An environment that is edited while a run stands


def write_environment(folder: Path, even: int) -> None:
    """Parity's, with its reward in a file beside it."""
    text = Path(PARITY.rpartition(":")[0]).read_text().replace("% 2 == 0)", "% 2 == EVEN)")
    (folder / "mine.py").write_text(text.replace("class RowParity", "from rule import EVEN\n\n\nclass RowParity"))
    (folder / "rule.py").write_text(f"EVEN = {even}\n")


def test_source_digest_is_of_the_file_and_of_what_it_imports_from_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import json\nfrom near import x\nimport pack.inner\n")
    (tmp_path / "near.py").write_text("def f():\n    import further\n")
    (tmp_path / "further.py").write_text("")
    (tmp_path / "pack").mkdir()
    for name in ("pack/__init__.py", "pack/inner.py", "unused.py"):
        (tmp_path / name).write_text("")
    digests = [source_digest(file)]
    for name in ("mine.py", "near.py", "further.py", "pack/inner.py"):
        (tmp_path / name).write_text((tmp_path / name).read_text() + "# changed\n")
        digests.append(source_digest(file))
    assert len(set(digests)) == 5
    (tmp_path / "unused.py").write_text("# changed\n")
    copied = shutil.copytree(tmp_path, tmp_path / "elsewhere")
    assert source_digest(file) == source_digest(copied / "mine.py") == digests[-1]


@pytest.mark.slow
def test_changed_environment_is_asked_for_and_its_rows_are_of_another_version(tmp_path: Path) -> None:
    write_environment(tmp_path, even=0)
    config = small_config(
        tmp_path / "runs",
        save_qwen2(tmp_path / "model"),
        environment={"name": f"{tmp_path / 'mine.py'}:Parity"},
        evaluation={"tasks": 1},
    )
    run = train(config, display=StopAfter(1)).folder
    first = source_digest(tmp_path / "mine.py")
    assert open_run_folder(run).environments == (first,)
    evaluate_run(run)

    write_environment(tmp_path, even=1)
    second = source_digest(tmp_path / "mine.py")
    changed = rf"mine.py:Parity changed since \(digest {second[:8]} after {first[:8]}\)\. Put it back, or go on with "
    for going_on in (partial(evaluate_run, run), partial(train, config, resume=True, display=SilentDisplay())):
        with pytest.raises(UserError, match=changed):
            going_on()
    version = f"1+{second[:8]}"
    assert evaluate_run(run, environment_changed=True).evaluated.environment_version == version

    display = SilentDisplay()
    train(config, resume=True, environment_changed=True, display=display)
    (note,) = [note for note in display.notes if note.startswith("environment changed")]
    assert f"have its version {version}; 16 of other versions can still be drawn" in note
    assert note.endswith(f"""{run} --where "environment_version != '{version}' and source == 'self'" --yes""")
    stored = "select iteration, environment_version, count(*) from trajectories group by 1, 2 order by 1"
    assert rows(run / "replay.sqlite", stored) == [(1, "1", 16), (2, version, 12), (3, version, 12)]
    assert open_run_folder(run).environments == (first, second)
    evaluate_run(run)  # the source is now the run's last one
