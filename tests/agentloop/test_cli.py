"""The front door: what people and programs type, and what they are told."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from agentloop.cli import app, main
from agentloop.config.file import to_plain
from tests.agentloop.runs import PARITY, rows, save_qwen2, small_config

PROGRAM = Path(sys.executable).with_name("agentloop")
HELP_CPU_SECONDS = 1.5


def commands() -> Iterator[list[str]]:
    """The words of every command there is, groups too."""
    waiting: list[tuple[list[str], Any]] = [([], typer.main.get_command(app))]
    while waiting:
        words, command = waiting.pop()
        yield words
        waiting += [([*words, name], below) for name, below in getattr(command, "commands", {}).items()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen2(tmp_path_factory.mktemp("models") / "qwen2")


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """Three iterations of 16 trajectories; JSON is YAML."""
    path = tmp_path_factory.mktemp("configs") / "small.yaml"
    path.write_text(json.dumps(to_plain(small_config(Path("runs"), model)), indent=1))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, config_file: Path) -> subprocess.CompletedProcess[str]:
    """A run from a shell, with --json; `args[0]` is where it stood."""
    folder = tmp_path_factory.mktemp("finished")
    done = subprocess.run(
        [PROGRAM, "train", config_file, "--json"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return subprocess.CompletedProcess([str(folder)], done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def standing(finished: subprocess.CompletedProcess[str]) -> Path:
    """A folder with the finished run in ./runs."""
    return Path(finished.args[0])


@pytest.fixture(scope="module")
def database(standing: Path) -> Path:
    return standing / "runs/small-001/replay.sqlite"


class Shell:
    """Types commands in one folder, at the real entry point but without a new process."""

    def __init__(self, patch: pytest.MonkeyPatch, captured: pytest.CaptureFixture[str]) -> None:
        self._patch = patch
        self._captured = captured

    def type(self, words: list[str | Path], folder: Path) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        self._patch.chdir(folder)
        self._patch.setattr(sys, "argv", ["agentloop", *map(str, words)])
        self._captured.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        output, errors = self._captured.readouterr()
        assert ended.value.code is None or isinstance(ended.value.code, int)
        return ended.value.code or 0, output, errors

    def refusal(self, words: list[str | Path], folder: Path) -> str:
        """The one line of a mistake that the user can mend."""
        code, output, errors = self.type(words, folder)
        assert (code, output) == (2, "")
        (line,) = errors.splitlines()
        assert line.startswith("agentloop: ")
        return line.removeprefix("agentloop: ")


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Shell:
    return Shell(monkeypatch, capfd)


# Help


@pytest.mark.parametrize("words", list(commands()), ids=lambda words: " ".join(["agentloop", *words]))
def test_help_has_an_example(words: list[str], shell: Shell, tmp_path: Path) -> None:
    code, output, errors = shell.type([*words, "--help"], tmp_path)
    assert (code, errors) == (0, "")
    assert f"Example: {' '.join(['agentloop', *words])}" in output


def test_commands_are_those_of_the_documentation() -> None:
    found = {" ".join(words) for words in commands()}
    looking = ["stats", "ls", "show", "diff", "lineage", "task", "mix", "preview"]
    changing = ["import", "prune", "forget", "migrate"]
    replay = {f"replay {name}" for name in (*looking, *changing, "export", "verify", "rescore", "whatif")}
    context = {"context", "context check", "context show"}
    assert (
        found == {"", "train", "sft", "evaluate", "report", "inspect", "config", "doctor", "replay"} | replay | context
    )


@pytest.mark.parametrize("words", [["--help"], ["replay", "--help"]], ids=" ".join)
def test_help_answers_at_once_and_without_torch(words: list[str]) -> None:
    script = (
        "import resource, sys, agentloop.cli\n"
        f"sys.argv = ['agentloop', *{words!r}]\n"
        "try:\n    agentloop.cli.main()\n"
        "finally:\n"
        "    used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "    print(used.ru_utime + used.ru_stime, 'torch' in sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    seconds, torch = done.stderr.split()
    assert "Usage: agentloop" in done.stdout
    assert torch == "False"
    assert float(seconds) < HELP_CPU_SECONDS


# A run, as people and programs see it


def test_train_prints_nothing_but_json_to_stdout(finished: subprocess.CompletedProcess[str], database: Path) -> None:
    result = json.loads(finished.stdout)
    evaluations = [value for (value,) in rows(database, _EVALUATIONS)]
    assert result == {
        "folder": "runs/small-001",
        "iterations": 3,
        "success_before": evaluations[0],
        "success_after": evaluations[-1],
        "report": "runs/small-001/report.html",
        "exit_code": 0,
    }


_EVALUATIONS = "select value from metrics where name = 'eval/success' order by iteration"


def test_train_tells_its_progress_in_plain_lines_where_there_is_no_terminal(
    finished: subprocess.CompletedProcess[str],
) -> None:
    lines = finished.stderr.splitlines()
    assert lines[:2] == ["chat template: append-only", "run folder: runs/small-001"]
    iterations = [line for line in lines if line.startswith("iteration ")]
    assert [line.split("  ")[0] for line in iterations] == ["iteration 1/3", "iteration 2/3", "iteration 3/3"]
    figures = r"success \d+\.\d %  fresh 12 \+ replay 4  replay ESS \d\.\d\d  held-out \d+\.\d %  [\d,]+ tokens/s"
    assert re.search(figures + r"  left <= \d+:\d\d$", iterations[1])
    assert "\x1b" not in finished.stderr


def test_train_ends_with_success_and_three_commands_that_work(
    config_file: Path, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{PROGRAM.parent}{os.pathsep}{os.environ['PATH']}")
    sets = ["--set", "run.iterations=1", "--set", "environment.options={}"]
    code, output, _ = shell.type(["train", config_file, *sets], tmp_path)
    assert code == 0
    *_, success, folder, title, stats, failed, train = output.splitlines()
    before, after = rows(tmp_path / "runs/small-001/replay.sqlite", _EVALUATIONS)
    assert success == f"held-out success: {100 * before[0]:.1f} % -> {100 * after[0]:.1f} %"
    assert folder == "run folder: runs/small-001   report: runs/small-001/report.html"
    assert title == "try next:"
    assert shlex.split(stats, comments=True) == ["agentloop", "replay", "stats", "runs/small-001"]
    assert shlex.split(failed, comments=True) == ["agentloop", "replay", "ls", "runs/small-001", "--failed"]
    again = ["agentloop", "train", str(config_file), *sets, "--set", "replay.fraction=0.5"]
    assert shlex.split(train, comments=True) == again
    for hint in (stats, failed, train):
        assert shell.type(list(shlex.split(hint, comments=True)[1:]), tmp_path)[0] == 0


def test_train_names_itself_as_it_was_called_where_it_is_not_on_the_path(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [".venv/bin/agentloop", "train", str(config_file), "--set", "run.iterations=1"])
    with pytest.raises(SystemExit):
        main()
    assert "\n  .venv/bin/agentloop replay stats runs/small-001 " in capsys.readouterr().out


def test_evaluate_repeats_the_evaluation_of_training(
    shell: Shell, standing: Path, finished: subprocess.CompletedProcess[str]
) -> None:
    code, output, _ = shell.type(["evaluate", "--json"], standing)
    result = json.loads(output)
    assert (code, result["tasks"]) == (0, 8)
    assert result["success"] == json.loads(finished.stdout)["success_after"]
    single = {"success", "tasks", "samples", "engine_failures", "confidence"}
    assert set(result) == {*single, "pass_at_k", "mean_reward", "mean_turns", "stop_reasons"}
    assert result["pass_at_k"]["1"]["value"] == result["success"]


def test_evaluate_can_take_an_earlier_policy_and_other_tasks(
    shell: Shell, standing: Path, finished: subprocess.CompletedProcess[str]
) -> None:
    _, output, _ = shell.type(["evaluate", "runs/small-001", "--policy", "0", "--json"], standing)
    assert json.loads(output)["success"] == json.loads(finished.stdout)["success_before"]
    _, output, _ = shell.type(["evaluate", "--tasks", "3"], standing)
    assert re.match(r"held-out success: \d+\.\d % \(3 tasks\)\n {10,}value +from +to +95 % interval\npass@1 ", output)


def test_evaluate_with_samples_tells_pass_at_k(shell: Shell, standing: Path) -> None:
    _, output, _ = shell.type(["evaluate", "--tasks", "3", "--samples", "6"], standing)
    lines = output.splitlines()
    assert re.fullmatch(r"held-out success: \d+\.\d % \(3 tasks, 6 samples each\)", lines[0])
    assert [line.split()[0] for line in lines[2:6]] == ["pass@1", "pass@2", "pass@4", "pass@6"]
    _, output, _ = shell.type(["evaluate", "--tasks", "3", "--samples", "6", "--json"], standing)
    found = json.loads(output)
    rates = [found["pass_at_k"][k]["value"] for k in ("1", "2", "4", "6")]
    assert rates == sorted(rates)
    assert sum(share["value"] for share in found["stop_reasons"].values()) == pytest.approx(1.0)


def test_config_as_json_is_the_run_s_own(shell: Shell, config_file: Path, standing: Path) -> None:
    code, output, _ = shell.type(["config", config_file, "--json"], standing)
    assert code == 0
    assert json.loads(output) == json.loads((standing / "runs/small-001/run.json").read_text())["config"]


def test_doctor_as_json_names_every_check(shell: Shell, tmp_path: Path) -> None:
    _, output, _ = shell.type(["doctor", "--json"], tmp_path)
    found = json.loads(output)
    assert {"python", "torch", "sqlite", "module context", "module replay", "device", "disk"} <= {
        check["name"] for check in found
    }
    assert all(check["status"] in ("ok", "warn", "fail") for check in found)


# Looking into the buffer


def test_replay_stats_agree_with_plain_sql(shell: Shell, standing: Path, database: Path) -> None:
    code, output, _ = shell.type(["replay", "stats", "--json"], standing)
    answer = json.loads(output)
    totals = rows(database, "select count(*), sum(num_tokens), sum(success), sum(num_action_tokens) from trajectories")
    keys = ("trajectories", "tokens", "successes", "action_tokens")
    assert code == 0
    assert [tuple(answer[key] for key in keys)] == totals
    # 16 fresh, then twice 12 fresh and 4 replayed
    streams = dict(rows(database, "select stream, count(*) from draws where state = 'committed' group by 1"))
    assert streams == {"fresh": 40, "replay": 8} == {name: answer["draws"][name] for name in ("fresh", "replay")}
    reasons = dict(rows(database, "select stop_reason, count(*) from trajectories group by 1"))
    assert answer["stop_reasons"] == reasons
    assert [(answer["iterations"], answer["policies"])] == [(3, 4)]


def test_replay_stats_for_people_agree_with_plain_sql(shell: Shell, standing: Path, database: Path) -> None:
    _, output, _ = shell.type(["replay", "stats"], standing)
    ((stored, tokens, share),) = rows(database, "select count(*), sum(num_tokens), avg(success) from trajectories")
    assert f"trajectories  {stored} in " in output
    assert f"tokens        {tokens:,}, " in output
    assert f"success       {100 * share:.1f} %" in output
    assert "updates used  40 fresh, 8 replayed" in output


def test_replay_ls_lists_what_plain_sql_finds(shell: Shell, standing: Path, database: Path) -> None:
    _, output, _ = shell.type(["replay", "ls", "--failed", "--limit", "1000", "--json"], standing)
    found = {row["id"] for row in json.loads(output)}
    assert found == {id for (id,) in rows(database, "select id from trajectories where not success")}
    assert found


def test_replay_show_tells_every_update_that_used_a_trajectory(shell: Shell, standing: Path, database: Path) -> None:
    query = "select trajectory, iteration, slot, stream from draws where stream = 'replay' limit 1"
    ((id, iteration, slot, stream),) = rows(database, query)
    _, output, _ = shell.type(["replay", "show", id[:12], "--json"], standing)
    answer = json.loads(output)
    assert answer["id"] == id
    assert (iteration, slot, stream) in {(use["iteration"], use["slot"], use["stream"]) for use in answer["uses"]}
    _, text, _ = shell.type(["replay", "show", id[:12]], standing)
    assert id in text
    assert "every update that used it:" in text


# Mistakes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("replay:\n  fracton: 0.2\n", "run.yaml:2: replay.fracton must be a known key, got an unknown one. Did you"),
        ("replay:\n  fraction: 1.5\n", "run.yaml:2: replay.fraction must be a number from 0 to 1, got 1.5."),
        ("batch:\n  trajectories: many\n", "run.yaml:2: batch.trajectories must be a whole number"),
        ("run: {seed: 1, seed: 2}\n", "run.yaml:1: run.seed must be given once"),
        ("run: &anchor {seed: 1}\n", "run.yaml:1: run must not use YAML anchors"),
        ("run: *anchor\n", "run.yaml:1: run must not use YAML aliases"),
        (
            "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: &d [*c, *c]\n",
            "run.yaml:1: a must not use YAML anchors",
        ),
        ("run: [\n", "run.yaml:"),
    ],
)
@pytest.mark.parametrize("command", ["train", "config"])
def test_mistake_in_a_file_is_one_line(command: str, text: str, message: str, shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    assert shell.refusal([command, "run.yaml"], tmp_path).startswith(message)
    assert not (tmp_path / "runs").exists()


def test_mistake_in_an_override_is_one_line(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("run: {seed: 1}\n")
    line = shell.refusal(["config", "run.yaml", "--set", "replay.fraction=1.5"], tmp_path)
    assert line.startswith("override replay.fraction=1.5: replay.fraction must be a number from 0 to 1, got 1.5.")


def test_missing_file_is_one_line(shell: Shell, tmp_path: Path) -> None:
    line = shell.refusal(["train", "nowhere.yaml"], tmp_path)
    assert line.startswith("nowhere.yaml: the file must be there to read, got: no such file")


def test_folder_without_a_model_is_one_line(tmp_path: Path) -> None:
    """In a process of its own: what transformers prints by itself would be seen here."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "run.yaml").write_text("model: {path: empty}\n")
    done = subprocess.run([PROGRAM, "train", "run.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith(
        "agentloop: model.path must be a folder or hub id of a causal LM with a tokenizer, got 'empty'"
    )


def test_model_without_a_chat_template_is_one_line(shell: Shell, config_file: Path, tmp_path: Path) -> None:
    folder = save_qwen2(tmp_path / "plain")
    (folder / "chat_template.jinja").unlink()
    line = shell.refusal(["train", config_file, "--set", f"model.path={folder}"], tmp_path)
    assert line.startswith(f"model.path must have a chat template, got none in '{folder}'.")


ENVIRONMENT = """
from agentloop import Environment, Task, tool

class Mine(Environment):
    def __init__(self, size: int = 3):
        self.size = size

    def make_task(self, rng):
        return Task(f"Say {rng.random()}")

    @tool
    def look(self, key: str) -> RESULT:
        DOCSTRING
        return key

    def reward(self, task, messages):
        return 0.0
"""


@pytest.mark.parametrize(
    ("result", "docstring", "options", "message"),
    [
        ("str", "", "{}", "mine.py:Mine.look must have a docstring"),
        ("bytes", '"""Look up."""', "{}", "mine.py:Mine.look must return "),
        (
            "str",
            '"""Look up."""',
            "{sise: 4}",
            "environment.options must be arguments of mine.py:Mine, got 'sise'. Did",
        ),
        ("str", '"""Look up."""', "{size: big}", "environment.options.size must be int, got 'big'."),
    ],
)
def test_mistake_in_an_environment_is_told_before_the_first_episode(
    result: str, docstring: str, options: str, message: str, config_file: Path, shell: Shell, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(ENVIRONMENT.replace("RESULT", result).replace("DOCSTRING", docstring))
    sets = ["--set", "environment.name=mine.py:Mine", "--set", f"environment.options={options}"]
    assert shell.refusal(["train", config_file, *sets], tmp_path).startswith(message)


def test_strict_run_whose_strategy_rewrites_stops_with_one_line(
    config_file: Path, shell: Shell, tmp_path: Path
) -> None:
    parser = Path(__file__).with_name("parity_environment.py")
    keys = ["context.strict=true", "context.strategy=linear_think", f"context.parser={parser}:Pondering"]
    code, _, errors = shell.type(["train", config_file, *(word for key in keys for word in ("--set", key))], tmp_path)
    assert code == 2
    (line,) = errors.splitlines()
    assert line.startswith("agentloop: context.strict must hold for every prompt, got the strategy linear_think, which")
    assert "Use context.strategy: linear, or strict: false." in line


def test_option_that_the_environment_does_not_take_is_one_line(config_file: Path, shell: Shell, tmp_path: Path) -> None:
    line = shell.refusal(["train", config_file, "--set", "environment.options.size=3"], tmp_path)
    assert line.startswith(f"environment.options must be arguments of {PARITY}, got 'size'.")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["replay", "show", "zzzz"], "ID must be the beginning of one trajectory's id, got 'zzzz', which begins none."),
        (["evaluate", "--policy", "999"], "--policy must be a kept snapshot of runs/small-001, got 999. Kept: 0..3."),
        (["evaluate", "nowhere"], "RUN must be a run folder with a run.json, got 'nowhere'."),
        (["replay", "stats", "nowhere"], "database must be an existing file, got nothing at nowhere"),
    ],
)
def test_mistake_in_an_argument_is_one_line(
    words: list[str | Path], message: str, shell: Shell, standing: Path
) -> None:
    assert shell.refusal(words, standing).startswith(message)


@pytest.mark.parametrize("words", [["evaluate"], ["replay", "stats"], ["replay", "ls"]], ids=" ".join)
def test_no_run_to_look_at_is_one_line(words: list[str | Path], shell: Shell, tmp_path: Path) -> None:
    assert shell.refusal(words, tmp_path).startswith("RUN must be given when there is no run under ")


def test_want_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def starved() -> None:
        raise MemoryError("Unable to allocate 7.45 GiB")

    monkeypatch.setattr("agentloop.cli.app", starved)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    told = "agentloop: memory must suffice, got Unable to allocate 7.45 GiB. Stop other programs or do less at once.\n"
    assert capsys.readouterr().err == told
