"""What people and programs type, and what is printed."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer

from agentloop import TrainResult
from agentloop.cli.main import LateCommand, app
from agentloop.cli.options import program
from agentloop.cli.run_commands import closing_words, next_run
from agentloop.config import RunConfig
from agentloop.config.config_file import to_plain
from agentloop.runs.display import with_interval
from tests.fakes.records import new_store
from tests.fakes.runs import rows, small_config
from tests.fakes.shell import Shell

DATABASE = "runs/small-001/replay.sqlite"
PROGRAM = Path(sys.executable).with_name("agentloop")


def commands() -> Iterator[list[str]]:
    """The words of every command there is, groups too."""
    waiting: list[tuple[list[str], Any]] = [([], typer.main.get_command(app))]
    while waiting:
        words, command = waiting.pop()
        yield words
        command = command.loaded() if isinstance(command, LateCommand) else command
        waiting += [([*words, name], below) for name, below in getattr(command, "commands", {}).items()]


def test_home_is_known_in_every_path(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("run: {name: mine}\n")
    (tmp_path / "elsewhere").mkdir()
    code, output, _ = shell.type(["config", "~/mine.yaml", "--json"], tmp_path / "elsewhere")
    assert (code, json.loads(output)["run"]["name"]) == (0, "mine")
    for folder in (["--folder", "~/runs"], ["--folder=~/runs"]):
        _, output, _ = shell.type(["doctor", *folder], tmp_path / "elsewhere")
        assert f"free in {tmp_path}" in output
    assert f"got nothing at {tmp_path}/none." in shell.refusal(["replay", "stats", "~/none"], tmp_path / "elsewhere")


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory, qwen2: Path) -> Path:
    """Three iterations of 16 trajectories; JSON is YAML."""
    path = tmp_path_factory.mktemp("configs") / "small.yaml"
    path.write_text(json.dumps(to_plain(small_config(Path("runs"), qwen2)), indent=1))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, config_file: Path) -> subprocess.CompletedProcess[str]:
    """A run from a shell, with --json; `args[0]` is where it stood."""
    folder = tmp_path_factory.mktemp("finished")
    done = subprocess.run([PROGRAM, "train", config_file, "--json"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return subprocess.CompletedProcess([str(folder)], done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def standing(finished: subprocess.CompletedProcess[str]) -> Path:
    """A folder with the finished run in ./runs."""
    return Path(finished.args[0])


# Help


def test_commands_are_those_of_the_documentation_and_their_help_has_an_example(shell: Shell, tmp_path: Path) -> None:
    for words in commands():
        code, output, errors = shell.type([*words, "--help"], tmp_path)
        assert (code, errors) == (0, ""), words
        assert f"Example: {' '.join(['agentloop', *words])}" in output
    assert shell.type(["--version"], tmp_path) == (0, f"agentloop {version('agentloop-replay')}\n", "")
    found = {" ".join(words) for words in commands()}
    looking = ["stats", "ls", "show", "lineage", "tasks", "mix"]
    changing = ["import", "prune", "compact", "forget", "demonstrations"]
    replay = {f"replay {name}" for name in (*looking, *changing, "export", "verify", "rescore")}
    context = {"context", "context check"}
    running = {"train", "sft", "evaluate", "export", "engine", "worker", "gateway", "launch"}
    environments = {"env", "env check", "env play", "env demonstrate"}
    assert found == {"", "report", "inspect", "config", "doctor", "replay"} | running | replay | context | environments


HEAVY = {"torch", "transformers", "alembic", "pyarrow", "uvicorn", "datasets", "pandas"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (["--help"], HEAVY | {"pydantic", "sqlalchemy", "numpy"}),
        (["replay", "--help"], HEAVY),
        (["replay", "stats", "RUN"], HEAVY),
        (["replay", "verify", "RUN"], HEAVY),
        (["report", "RUN"], {"torch", "transformers", "alembic"}),
    ],
    ids=["agentloop", "replay", "stats", "verify", "report"],
)
def test_commands_answer_at_once_because_they_import_little(words: list[str], heavy: set[str], tmp_path: Path) -> None:
    new_store(tmp_path / "replay.sqlite").close()
    words = [str(tmp_path) if word == "RUN" else word for word in words]
    script = (
        "import sys, agentloop.cli.main\n"
        f"sys.argv = ['agentloop', *{words!r}]\n"
        "try:\n    agentloop.cli.main.main()\n"
        "finally:\n    print(*sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout
    assert heavy & set(done.stderr.split()) == set()


def test_commands_that_are_imported_late_are_listed_with_their_own_help() -> None:
    late = [command for command in typer.main.get_command(app).commands.values() if isinstance(command, LateCommand)]
    names = ["engine", "worker", "launch", "gateway", "inspect", "report", "env", "context", "replay"]
    assert [command.name for command in late] == names
    assert [command.help for command in late] == [str(c.loaded().help).partition("\n\n")[0] for c in late]


# A run, as people and programs see it

_EVALUATIONS = "select value from metrics where name = 'eval/success' order by iteration"


@pytest.mark.slow
def test_stdout_is_json_alone_and_stderr_plain_lines(
    finished: subprocess.CompletedProcess[str], standing: Path
) -> None:
    result = json.loads(finished.stdout)
    evaluations = [value for (value,) in rows(standing / DATABASE, _EVALUATIONS)]
    assert result == {
        "folder": "runs/small-001",
        "model": "runs/small-001/model",
        "iterations": 3,
        "success_before": evaluations[0],
        "success_after": evaluations[-1],
        "report": "runs/small-001/report.html",
        "evaluated_after": 3,
        "held_out_tasks": 8,
        "troubles": [],
        "best": max(zip(evaluations, (0, 2, 3), strict=True))[1],
        "why_ended": "all iterations are made",
        "exit_code": 0,
    }
    # Its progress is plain lines where there is no terminal.
    lines = finished.stderr.splitlines()
    assert lines[:2] == ["loading the model ...", "chat template: append-only"]
    assert [line.partition(" ")[0] for line in lines[2:5]] == ["computing", "memory:", "disk:"]
    assert lines[5] == "run folder: runs/small-001"
    iterations = [line for line in lines if line.startswith("iteration ")]
    assert [line.split("  ")[0] for line in iterations] == ["iteration 1/3", "iteration 2/3", "iteration 3/3"]
    figures = (
        r"success \d+\.\d %  fresh 12 \+ replay 4  replay ESS \d\.\d\d  held-out \d+\.\d % \(\d+-\d+\)  [\d,]+ tokens/s"
    )
    assert re.search(figures + r"  left <= \d+:\d\d$", iterations[1])
    assert "\x1b" not in finished.stderr


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (0, "12.5 % (5-26) before training; it was not measured since (evaluation.every)"),
        (4, "12.5 % (5-26) -> 75.0 % (60-86) after iteration 4 of 6"),
    ],
)
def test_train_says_when_its_success_was_measured(last: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("runs/a-001")
    result = TrainResult(folder, 6, 0.125, 0.75, folder / "report.html", last, 40, 0, why_ended="of patience")
    closing_words(result, None)
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-1]) == (f"held-out success: {words}", "ended after iteration 6: of patience")


@pytest.mark.parametrize(
    ("before", "after", "troubles", "command", "setting"),
    [
        (0.0, 0.0, (), "sft", "sft.data=DEMONSTRATIONS.jsonl"),
        (0.05, 0.0, (), "sft", "sft.data=DEMONSTRATIONS.jsonl"),
        (0.375, 0.0, ("learning rate",), "train", "optimizer.learning_rate=0.00015"),
        (0.375, 0.325, (), "train", "replay.fraction=0.5"),
    ],
)
def test_advice_fits_a_run(before: float, after: float, troubles: tuple[str, ...], command: str, setting: str) -> None:
    folder = Path("runs/a-001")
    result = TrainResult(folder, 6, before, after, folder / "report.html", 6, 40, 0, troubles)
    found = next_run(Path("a.yaml"), ["run.seed=1"], RunConfig(), result)
    assert found is not None
    assert found[0][1:] == [command, "a.yaml", "--set", "run.seed=1", "--set", setting]


@pytest.mark.slow
def test_train_ends_with_success_and_three_commands_that_work(
    config_file: Path, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{PROGRAM.parent}{os.pathsep}{os.environ['PATH']}")
    sets = ["--set", "run.iterations=1", "--set", "environment.options={}"]
    code, output, _ = shell.type(["train", config_file, *sets], tmp_path)
    assert code == 0
    *_, success, model, folder, title, stats, failed, train, why = output.splitlines()
    before, after = rows(tmp_path / "runs/small-001/replay.sqlite", _EVALUATIONS)
    assert success == f"held-out success: {with_interval(before[0], 8)} -> {with_interval(after[0], 8)}"
    assert model == "trained model: runs/small-001/model"
    assert folder == "run folder: runs/small-001   report: runs/small-001/report.html"
    assert title == "try next:"
    assert shlex.split(stats, comments=True) == ["agentloop", "replay", "stats", "runs/small-001"]
    assert shlex.split(failed, comments=True) == ["agentloop", "replay", "ls", "runs/small-001", "--failed"]
    again = ["agentloop", "train", str(config_file), *sets, "--set", "replay.fraction=0.5"]
    assert shlex.split(train, comments=True) == again
    assert why == "ended after iteration 1: all iterations are made"
    for hint in (stats, failed, train):
        assert shell.type(list(shlex.split(hint, comments=True)[1:]), tmp_path)[0] == 0


def test_program_off_the_path_is_named_by_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    assert program() == ".venv/bin/agentloop"
    monkeypatch.setenv("PATH", str(PROGRAM.parent))
    assert program() == "agentloop"


@pytest.mark.slow
def test_evaluate_repeats_the_evaluations_of_training_and_takes_other_tasks(
    shell: Shell, standing: Path, finished: subprocess.CompletedProcess[str]
) -> None:
    trained = json.loads(finished.stdout)
    code, output, errors = shell.type(["evaluate", "runs/small-001", "--policy", "0", "--json"], standing)
    assert code == 0, errors
    found = json.loads(output)
    assert found["success"] == trained["success_before"]
    assert (found["policy_version"], found["checkpoint"]) == (0, "runs/small-001/policies/000000")
    code, output, _ = shell.type(["evaluate", "--json"], standing)
    result = json.loads(output)
    assert (code, result["tasks"], result["success"]) == (0, 8, trained["success_after"])
    facts = {"run": "runs/small-001", "policy_version": 3, "checkpoint": "runs/small-001/checkpoints/000003/model"}
    facts |= {"environment": "parity.py:Parity", "environment_version": "1"}
    assert {name: result.pop(name) for name in facts} == facts
    single = {"success", "tasks", "samples", "engine_failures", "confidence"}
    several = {"pass_at_k", "pass_hat_k", "mean_reward", "mean_turns", "stop_reasons", "environments", "categories"}
    assert set(result) == {*single, *several, "by", "per_task"}
    _, output, _ = shell.type(["evaluate", "--tasks", "3", "--samples", "6"], standing)
    first, success, titles, *lines = output.splitlines()
    assert first.startswith("evaluated: runs/small-001: policy 3 (runs/small-001/checkpoints/000003/model), environ")
    assert re.fullmatch(r"held-out success: \d+\.\d % \(3 tasks, 6 samples each\)", success)
    assert titles.split() == ["value", "from", "to", "95", "%", "interval"]
    assert [line.split()[0] for line in lines[:4]] == ["pass@1", "pass@2", "pass@4", "pass@6"]


@pytest.mark.slow
def test_doctor_prints_json(shell: Shell, tmp_path: Path) -> None:
    found = json.loads(shell.type(["doctor", "--json"], tmp_path)[1])
    assert {check["status"] for check in found} <= {"ok", "warn", "fail"}
