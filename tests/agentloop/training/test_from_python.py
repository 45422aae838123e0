"""`agentloop.train` with functions and rows, as a notebook calls it."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import agentloop
import replay
from agentloop import Task, TrainResult
from agentloop.analysis.exported_model import export_run
from agentloop.analysis.stored_policies import evaluate_run
from agentloop.errors import UserError
from agentloop.runs.run_folder import config_to_resume
from agentloop.training.from_python import json_lines, tasks_section
from agentloop.training.train import train as train_run
from replay.questions import summary
from tests.fakes.environments import functions
from tests.fakes.processes import assert_same_run
from tests.fakes.refusals import refusal_of
from tests.fakes.runs import SilentDisplay, StopAfter, rows, small_config

FILE = Path(functions.__file__)
SMALL: dict[str, dict[str, Any]] = {
    "run": {"iterations": 3},
    "batch": {"trajectories": 8, "group_size": 4, "mini_batch": 8},
    "rollout": {"max_turns": 2, "max_tokens_per_turn": 8},
    "context": {"max_tokens": 400},
    "evaluation": {"every": 2, "tasks": 4},
}
ROWS = [{"prompt": f"Say {number}.", "letters": "aeiou", "store": {"box": str(number)}} for number in range(40)]


def small(folder: Path, **changed: Any) -> dict[str, Any]:
    return {**SMALL, "run": {**SMALL["run"], "folder": str(folder)}, **changed}


def vowels(episode: Any, letters: str) -> float:
    """1 for an answer with an even number of vowels: a random policy is right half of the time."""
    return float(sum(letter in letters for letter in episode.messages[-1].content) % 2 == 0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, qwen2: Path) -> TrainResult:
    folder = tmp_path_factory.mktemp("runs")

    def look(key: str, task: Task) -> str:
        """Look into a box."""
        return str(task.payload["store"][key])

    async def called() -> TrainResult:  # a notebook's cells run inside of an event loop
        return agentloop.train(
            model=qwen2,
            tools=[look, functions.later],
            reward=[vowels, {"function": functions.columns, "weight": 0.01}],
            tasks=ROWS,
            replay={"fraction": 0.25, "sampler": "uniform", "successful_only": False},
            **small(folder),
        )

    return asyncio.run(called())


def test_run_trains_on_its_rows_with_replay_and_its_first_function_says_what_a_success_is(run: TrainResult) -> None:
    assert (run.iterations, run.exit_code) == (3, 0)
    database = run.folder / "replay.sqlite"
    assert rows(database, "select fresh, replay from iterations order by iteration") == [(8, 0), (6, 2), (6, 2)]
    assert len((run.folder / "tasks.jsonl").read_text().splitlines()) == 40
    stored = rows(database, "select distinct reward, success from trajectories")
    assert set(stored) == {(0.03, 0), (1.03, 1)}  # 0.01 x 3 columns
    names = rows(database, "select distinct name from metrics where name like 'reward/%'")
    assert sorted(name for (name,) in names) == ["reward/columns", "reward/vowels"]


def test_run_has_its_buffer_its_evaluations_and_its_model(run: TrainResult) -> None:
    with run.buffer as buffer:
        assert buffer.ask(summary)["trajectories"] == len(buffer.trajectories().to_pandas()) == 20
        assert str(run.folder) in repr(buffer) and repr(buffer.iterations()).startswith("rows of run, iteration, ")
    assert replay.open(run).metrics().to_arrow() == run.buffer.metrics().to_arrow()
    measured = run.evaluations()
    assert run.metrics["eval/success"].dropna().to_dict() == measured and list(run.metrics.index) == [0, 1, 2, 3]
    assert list(measured) == [0, 2, 3]
    assert (measured[0], measured[3]) == (run.success_before, run.success_after)
    found = run.evaluate()
    assert found.evaluation.success == run.success_after and len(str(found).splitlines()) == 4
    assert run.best is not None and run.evaluate(policy=run.best).evaluation.success == measured[run.best]
    assert json.loads((run.model / "config.json").read_text())["model_type"] == "qwen2"


def test_run_shows_itself_in_one_line_and_in_a_notebook_as_a_curve_with_a_table(run: TrainResult) -> None:
    shown = replace(run, success_before=0.25, success_after=0.5, held_out_tasks=4, best=2)
    success = "25.0 % (5-70) -> 50.0 % (15-85)"
    assert str(shown) == f"{run.folder}: iterations 3, held-out success {success}, best iteration 2"
    assert str(replace(shown, evaluated_after=0, best=None)) == (
        f"{run.folder}: iterations 3, held-out success 25.0 % (5-70) before training; it was not measured since "
        "(evaluation.every)"
    )
    page = shown._repr_html_()
    points = [(300 * at / 3, 100 - 100 * share) for at, share in run.evaluations().items()]
    assert f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"' in page
    assert "<tr><th>held-out success</th><td>25.0 % (5-70) -&gt; 50.0 % (15-85)</td></tr>" in page


def right(episode: Any) -> float:
    return float(len(episode.messages[-1].content) % 2)


def test_interrupted_run_with_functions_goes_on_as_unbroken_and_with_a_changed_one_if_allowed(
    tmp_path: Path, qwen2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(name: str, reward: Any = right, tasks: Any = ROWS, **options: Any) -> TrainResult:
        monkeypatch.setattr("agentloop.user_code._GIVEN", {})  # as in another process
        display = {"display": SilentDisplay(), **options}
        return agentloop.train(model=qwen2, reward=reward, tasks=tasks, **small(tmp_path / name), **display)

    whole, broken = trained("whole"), trained("broken", display=StopAfter(1))
    assert (broken.iterations, broken.exit_code) == (1, 143)
    with pytest.raises(UserError, match=r"^tasks must be the rows that the run began with, got others than those of "):
        trained("broken", tasks=ROWS[1:], resume=True)
    with pytest.raises(
        UserError, match=r"reward.functions must be the run's own .*'function': 'right'.*got .*'vowels .*py:"
    ):
        trained("broken", reward=vowels, resume=True)
    going_on = trained("broken", resume="auto")
    assert (going_on.folder, going_on.iterations) == (broken.folder, 3)
    assert_same_run(going_on.folder, whole.folder)

    def changed(episode: Any) -> float:
        return 1.0

    changed.__name__ = "right"
    trained("other", display=StopAfter(1))
    with pytest.raises(UserError, match=rf"^environment must have .* got right \({__file__}:\d+\) changed since"):
        trained("other", reward=changed, resume=True)
    assert trained("other", reward=changed, resume=True, environment_changed=True).iterations == 3


NUMBERS = [{"prompt": f"q{number}", "answer": number} for number in range(3)]


@pytest.mark.parametrize(
    "given",
    [
        pandas.DataFrame(NUMBERS),
        pyarrow.Table.from_pylist(NUMBERS),
        datasets.Dataset.from_list(NUMBERS),
        {name: [row[name] for row in NUMBERS] for name in NUMBERS[0]},
        {"data": pandas.DataFrame(NUMBERS), "shuffle": False},
        [{"prompt": row["prompt"], "answer": np.int64(row["answer"])} for row in NUMBERS],
    ],
    ids=["pandas", "arrow", "data set", "columns", "section", "numpy"],
)
def test_rows_in_any_form_of_one_meaning_are_the_same(given: Any) -> None:
    assert [json.loads(line) for line in json_lines(tasks_section(given)["data"])] == NUMBERS


def test_what_a_table_leaves_out_is_null_and_other_forms_are_named() -> None:
    lines = json_lines(tasks_section(pandas.DataFrame({"answer": [1.5, None]}))["data"])
    assert lines == ['{"answer": 1.5}\n', '{"answer": null}\n']
    with pytest.raises(UserError, match=r"got splits train, test\. Give one: tasks=data\['train'\]\."):
        tasks_section(datasets.DatasetDict({name: datasets.Dataset.from_list(NUMBERS) for name in ("train", "test")}))
    with pytest.raises(UserError, match=r"must be rows .* in row 2\. .* give None for what is not known"):
        json_lines([{"a": 1.0}, {"a": float("nan")}])


def test_what_another_process_can_not_call_is_one_error(run: TrainResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentloop.user_code._GIVEN", {})  # as in another process
    assert refusal_of(evaluate_run, run.folder) == (
        "environment.tools must name functions in files where another process is to call them, got look, which was "
        "given to agentloop.train as it is. Put it into a file, and train with 'path/to/file.py:look'."
    )


def test_run_can_be_moved_and_renamed(tmp_path: Path, qwen2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pair = AutoModelForCausalLM.from_pretrained(qwen2), AutoTokenizer.from_pretrained(qwen2)
    run = agentloop.train(
        model=pair, reward=f"{FILE}:right", tasks=[{**row, "answer": "x"} for row in ROWS], **small(Path("runs"))
    )
    stored = (run.folder / "run.json").read_text()
    assert '"data": "run:tasks.jsonl"' in stored and '"path": "run:given-model"' in stored
    assert run.folder.name not in stored
    moved = (tmp_path / "elsewhere").mkdir() or run.folder.rename(tmp_path / "elsewhere" / "mine")
    assert evaluate_run(moved).evaluation.success == run.success_after
    again = train_run(config_to_resume(moved, ["run.iterations=4"]), resume=True, run=moved, display=SilentDisplay())
    assert (again.iterations, again.folder) == (4, moved)
    assert (tmp_path / "exported") == Path(export_run(moved, str(tmp_path / "exported")))
    assert again.buffer.ask(summary)["iterations"] == 4
    (config,) = rows(moved / "replay.sqlite", "select config from runs")[0]
    assert json.loads(config)["tasks"]["data"] == "run:tasks.jsonl"
    assert list((tmp_path / "runs").iterdir()) == []


def test_run_beside_the_main_thread_leaves_signals_alone(tmp_path: Path, qwen2: Path) -> None:
    config, display = small_config(tmp_path, qwen2, run={"iterations": 1}), SilentDisplay()
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(lambda: agentloop.train(config, display=display)).result().exit_code == 0
    assert sum("signals are left alone" in note for note in display.notes) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tools": lambda a: a}, "tools must be functions with names, got <function"),
        ({"tools": functions.undocumented}, rf"^environment.tools: undocumented \({FILE}:\d+\) must have a docstring"),
        ({"tools": [len]}, "tools must be functions with names, got <built-in function len>"),
        ({"reward": "accuracy"}, r"reward.functions must have the form path/to/file.py:NAME, got 'accuracy'\."),
        ({"reward": 3}, "reward must be functions with names, got 3. Write def NAME"),
        ({"reward": functions.misspelt}, "reward.functions must take one argument.*with 'anser', which is none"),
        ({"reward": ()}, "reward.functions must be given when environment.name is rows"),
        ({"tasks": None}, "tasks.data must be given when environment.name is rows"),
        ({"tasks": ["x"]}, "tasks must be rows with columns, got a text in row 1"),
        ({"tasks": [{"prompt": "x", "object": object()}]}, "tasks must be rows of texts.*TypeError: object in row 1"),
        ({"tasks": [{"question": "x"}] * 2 + [{"question": "y"}]}, "environment.options.prompt must name a column"),
        ({"collection": {"by": "workers"}}, "collection.by must be loop for functions.*workers and vowels"),
        ({"replay": {"fracton": 0.5}}, "replay.fracton must be a known key, got an unknown one"),
        ({"tool": []}, "^agentloop.train: tool must be a known key, got an unknown one. Did you mean tools?"),
        (
            {"zq": 1},
            "^agentloop.train: zq must be a known key.* There is model, tools, reward, tasks, respond, call_tool, ",
        ),
        ({"learning_rate": 1.0}, "learning_rate must be a known key.* Did you mean optimizer.learning_rate?"),
        ({"iterations": 2}, "iterations must be a known key.* Did you mean run.iterations?"),
        ({"environment": SilentDisplay}, "environment must be a section of keys.*Put a class into a file, and write"),
        ({"environment": {"name": SilentDisplay}}, "environment must be a section of keys whose name is text, got"),
        ({"reward_funcs": []}, "reward_funcs must be a known key, got an unknown one. Here that is reward.functions: "),
        ({"model": None}, "model.path must name a model, got null: environment 'rows' has no make_task and demo"),
        ({"model": ("a", "b")}, r"model must be a folder, a hub id or a pair \(model, tokenizer\).*got tuple"),
    ],
)
def test_mistake_is_one_line_without_a_run(given: dict[str, Any], message: str, tmp_path: Path, qwen2: Path) -> None:
    right = {"model": qwen2, "reward": vowels, "tasks": ROWS}
    with pytest.raises(agentloop.UserError, match=message) as caught:
        agentloop.train(**{**right, **small(tmp_path), **given})
    assert len(caught.traceback) == 2  # this file's line, and the door
    assert list(tmp_path.iterdir()) == []
