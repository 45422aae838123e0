"""Whatever people get wrong is said in one line: what must hold, what was found, what to do. Never a traceback."""

import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentloop.cli.main import main
from agentloop.config.config_file import to_plain
from agentloop.training.train import train
from tests.fakes.runs import SilentDisplay, save_qwen2, small_config
from tests.fakes.shell import Shell

RULE = re.compile(r".+ must .+(, got:? .+| \(.+\))\..*")

MINE = """
from agentloop import Environment, Task

class OnlyRows(Environment):
    def task_from_row(self, row):
        return Task(row["question"], dict(row))

    def reward(self, task, messages):
        return 0.0

class BadReward(OnlyRows):
    def make_task(self, rng):
        return Task(f"Say {rng.randrange(100)}")

    def reward(self, task, messages):
        return len(messages[-1].content) and 1 / 0
"""


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, what spoils one, a configuration, files of the user's and a run of one iteration."""
    folder = tmp_path_factory.mktemp("standing")
    model = save_qwen2(folder / "model")
    config = small_config(folder / "runs", model, run={"iterations": 1}, evaluation={"tasks": 1})
    (folder / "small.yaml").write_text(json.dumps(to_plain(config)))
    (folder / "bare.yaml").write_text("run: {seed: 1}\n")
    (folder / "mine.py").write_text(MINE)
    (folder / "chat.json").write_text("[]")
    (folder / "rows.jsonl").write_text('{"question"\n')
    (folder / "asked.jsonl").write_text("".join(f'{{"question": "{number}"}}\n' for number in range(40)))
    (folder / "empty").mkdir()
    train(config, display=SilentDisplay())
    for name, spoil in SPOILT.items():
        shutil.copytree(model, folder / name)
        spoil(folder / name)
    return folder


def _configured(**values: Any) -> Callable[[Path], None]:
    def spoil(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return spoil


SPOILT: dict[str, Callable[[Path], object]] = {
    "wide": _configured(vocab_size=1000),
    "deep": _configured(num_hidden_layers=2, layer_types=["full_attention"] * 2),
    "nested": lambda model: (model / "config.json").write_text("[" * 10**5),
    "cut": lambda model: os.truncate(model / "model.safetensors", 1000),
    "elsewhere": lambda model: (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../a.bin"}}'),
    "blank": lambda model: [(model / f"tokenizer{end}.json").unlink() for end in ("", "_config")],
    "plain": lambda model: (model / "chat_template.jinja").unlink(),
}
"""Models that can't be trained, by what was done to a good one."""


def training(*sets: str) -> list[str]:
    return ["train", "small.yaml", *(word for each in ("run.folder=new", *sets) for word in ("--set", each))]


NO_MODEL = "model.path must be a folder or hub id of a causal LM with a tokenizer"
MISTAKES: list[tuple[list[str], str]] = [
    # configurations
    (["train", "nowhere.yaml"], "nowhere.yaml: the file must be there to read, got: no such file"),
    (["config", "bare.yaml", "--set", "model.path=???"], "override model.path=???: model.path must be given, got ???."),
    (["replay", "mix", "--config", "bare.yaml", "--set", "batch.group_size=0"], "override batch.group_size=0: batch."),
    (["sft", "small.yaml", "--set", "sft.data=rows.jsonl", "--set", "run.folder=new"], "rows.jsonl:1: "),
    (
        training("metrics.sinks=[tensorbord]"),
        "override metrics.sinks=[tensorbord]: metrics.sinks must be tensorboard, ",
    ),
    (["train", "runs"], "CONFIG must be a YAML file but with --resume, and without --run, got the folder 'runs'. To "),
    (["sft", "runs"], "CONFIG must be a YAML file but with --resume, got the folder 'runs'. To go on with the run in "),
    (["sft", "runs/small-001", "--resume"], "CONFIG must be the folder of a training by sft, got 'runs/small-001', wh"),
    (["train", "small.yaml", "--run", "runs"], "--run must be a run, or a folder that is empty or new, got 'runs'. Na"),
    (["train", "empty", "--resume"], "RUN must be a run folder with a run.json, got 'empty'."),
    # models
    (training("model.path=runs/small-001"), "model.path must be a model, got 'runs/small-001', a run's folder. Name "),
    (
        training("environment.name=mine.py:OnlyRows", "model.path=null", "tasks.data=asked.jsonl"),
        "model.path must name a model, got null: environment 'mine.py:OnlyRows' has no make_task and demonstrate",
    ),
    (training("model.path=empty"), f"{NO_MODEL}, got 'empty"),
    (training("model.path=/no/such/model"), f"{NO_MODEL}, got '/no/such/model' (there is no such folder). Check the "),
    (training("model.path=no/model"), f"{NO_MODEL}, got 'no/model' (there is no such folder, and as a hub id: OSErr"),
    (["evaluate", "--config", "bare.yaml"], "--model must be given where model.path of bare.yaml is null, got neither"),
    (training("model.path=wide"), "model.path must hold weights of the shapes that its config.json says, got [392, 32"),
    (training("model.path=deep"), "model.path must hold every weight of its architecture, got none for model.layers.1"),
    (training("model.path=nested"), f"{NO_MODEL}, got 'nested' (RecursionError: maximum recursion depth exceeded"),
    (training("model.path=cut"), "model.path must hold whole weights, got 'cut' with files that can't be read (Error"),
    (training("model.path=elsewhere"), "model.path must have its weights in .safetensors files of its own folder, got"),
    (training("model.path=blank"), "model.path must have a fast tokenizer, got none in 'blank'."),
    (training("model.path=plain"), "model.path must have a chat template, got none in 'plain'."),
    (training("context.template=llama3"), "context.template must be one for the model's vocabulary, got llama3 for"),
    # the user's own code
    (["train", "bare.yaml", "--set", "environments={a: {share: 1, options: {x: 1}}}"], "environments.a.options must "),
    (
        training("environment.name=mine.py:BadReward", "evaluation.tasks=8"),
        "BadReward.reward must return a number, got ZeroDivisionError: division by zero at mine.py:16 for the task ",
    ),
    # what a run left
    (["evaluate", "runs/small-001", "--policy", "9"], "--policy must be a version whose weights are still in"),
    (["evaluate", "runs/small-001", "--by", "kind"], "--by must name a field that each task's payload has, got kind."),
    (["evaluate", "runs/small-001", "--url", "http://127.0.0.1:9/v1"], "RUN must be given alone, or --config and p"),
    (["replay", "stats", "postgresql://nobody@127.0.0.1:1/none"], ""),
    (["replay", "verify", "empty", "--log-probs"], ""),
    (["inspect", "nowhere"], ""),
    (["context", "check", "empty"], ""),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[" ".join(words)[:90] for words, _ in MISTAKES])
def test_mistake_is_one_line(words: list[str], message: str, shell: Shell, standing: Path) -> None:
    code, output, errors = shell.type(list(words), standing)
    (line,) = errors.splitlines()
    assert (code, line.partition(" ")[0]) == (2, "agentloop:")
    assert "Traceback" not in output
    said = line.removeprefix("agentloop: ")
    assert said.startswith(message)
    assert RULE.fullmatch(said)
    assert not any((standing / "new").glob("*"))


def test_run_must_be_given_where_there_is_none(shell: Shell, tmp_path: Path) -> None:
    for words in (["evaluate"], ["replay", "stats"], ["replay", "ls"]):
        assert shell.refusal([*words], tmp_path).startswith("RUN must be given when there is no run under ")


def test_want_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def starved() -> None:
        raise MemoryError("Unable to allocate 7.45 GiB")

    monkeypatch.setattr("agentloop.cli.main.app", starved)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    said = "agentloop: memory must suffice, got Unable to allocate 7.45 GiB. Stop other programs or do less at once.\n"
    assert capsys.readouterr().err == said


def test_mistake_of_the_program_is_one_line_with_a_file_that_has_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("agentloop.cli.main.app", partial(json.loads, "{"))
    with pytest.raises(SystemExit) as stopped:
        main()
    assert (stopped.value.code, type(stopped.value.__cause__)) == (1, json.JSONDecodeError)
    said = r"agentloop: agentloop must not fail by itself, got JSONDecodeError: .+ with the traceback: (.+)\n"
    found = re.fullmatch(said, capsys.readouterr().err)
    assert found is not None
    assert Path(found[1]).read_text().startswith("Traceback (most recent call last):\n")
    Path(found[1]).unlink()
