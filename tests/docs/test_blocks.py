"""What the documentation tells people to type works: each fenced block is run here, or says why it is not."""

import shlex
import shutil
import sqlite3
import sys
from pathlib import Path

import pytest

from agentloop.cli.main import main
from agentloop.config.config_file import load_config
from tests.docs.blocks import ROOT, Block, blocks
from tests.fakes.run_roles import engine_executable
from tests.fakes.runs import rows

SMALL = [
    "batch.trajectories=8",
    "batch.group_size=4",
    "batch.mini_batch=8",
    "context.max_tokens=900",
    "rollout.max_turns=2",
    "rollout.max_tokens_per_turn=16",
    "evaluation.tasks=4",
    "sft.epochs=1",
]
"""Seconds instead of minutes; nothing else of a documented run is changed."""
DATABASE = "runs/quickstart-001/replay.sqlite"


def made_small(command: str, *, model: Path, trajectory: str = "", task: str = "", iterations: int = 3) -> list[str]:
    """The words of a documented command with its placeholders filled in, and a training run made small."""
    words = shlex.split(command, comments=True)
    words = [word.replace("path/or/hub-id", str(model)).replace("=PATH", f"={model}") for word in words]
    words = [{"ID": trajectory, "HASH": task}.get(word, word) for word in words]
    if words[:2] in (["agentloop", "train"], ["agentloop", "sft"]):
        given = " ".join(words)
        extra = [*SMALL, f"run.iterations={iterations}", *([] if "model.path=" in given else [f"model.path={model}"])]
        words += [part for setting in extra for part in ("--set", setting)]
    return words


def documented(language: str) -> list[Block]:
    return [block for block in blocks() if block.language == language and block.note is None]


COMMANDS = [(block.place, command) for block in documented("sh") for command in block.commands()]
TRAINING = [pair for pair in COMMANDS if pair[1].startswith("agentloop train") and "--resume" not in pair[1]]
RESUMING = [pair for pair in COMMANDS if pair[1].startswith("agentloop train") and "--resume" in pair[1]]
STORING = [pair for pair in COMMANDS if pair[1].startswith("agentloop replay import")]
LOOKING = [
    pair
    for pair in COMMANDS
    if pair[1].startswith("agentloop ") and not pair[1].startswith("agentloop train") and pair not in STORING
]
SQL = [pair for pair in COMMANDS if pair[1].startswith("sqlite3 ")]


def checkout(folder: Path) -> Path:
    """A folder to stand in while typing: the checkout without earlier runs."""
    folder.mkdir(parents=True)
    for name in ("configs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, qwen2: Path) -> Path:
    """Where somebody stands who has trained one run."""
    folder = checkout(tmp_path_factory.mktemp("trained") / "checkout")
    words = made_small("agentloop train configs/quickstart.yaml", model=qwen2)
    with pytest.MonkeyPatch.context() as patch:
        assert typed(words, folder, patch) == 0
    return folder


def typed(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Exit code of the real entry point, without the seconds that a new process takes to import torch."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    code = ended.value.code
    return code if isinstance(code, int) else int(code is not None)


@pytest.mark.parametrize("block", blocks(), ids=lambda block: block.place)
def test_block_is_run_or_says_why_not(block: Block) -> None:
    if block.note is not None:
        assert block.note[0] in ("not run", "file"), f"{block.place}: unknown note {block.note[0]!r}"
        return
    run = {command for _, command in (*TRAINING, *RESUMING, *LOOKING, *STORING, *SQL)}
    if block.language == "sh":
        left = [command for command in block.commands() if command not in run]
        assert not left, f"{block.place}: no test runs {left}; put `<!-- not run: why -->` on the line before the fence"
    else:
        what = f"a block in {block.language or 'no language'}"
        assert block.language in ("yaml", "python"), f"{block.place}: no test runs {what}; note `<!-- not run: why -->`"


@pytest.mark.parametrize("block", [b for b in blocks() if b.note and b.note[0] == "file"], ids=lambda b: b.place)
def test_block_is_its_file_word_for_word(block: Block) -> None:
    assert block.note is not None
    assert block.text == (ROOT / block.note[1]).read_text(encoding="utf-8")


@pytest.mark.parametrize("block", documented("yaml"), ids=lambda block: block.place)
def test_yaml_block_is_a_configuration(block: Block, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(block.text, encoding="utf-8")
    load_config(tmp_path / "run.yaml")


@pytest.mark.parametrize("block", documented("python"), ids=lambda block: block.place)
def test_python_block_runs_beside_a_trained_run(block: Block, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (trained / DATABASE).read_bytes()
    monkeypatch.chdir(trained)
    exec(compile(block.text, block.place, "exec"), {"__name__": "block"})  # noqa: S102  the documentation's own
    assert (trained / DATABASE).read_bytes() == before


@pytest.mark.parametrize(("at", "text"), TRAINING)
def test_training_command_trains(
    at: str, text: str, tmp_path: Path, qwen2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkout(tmp_path / "checkout")
    monkeypatch.setenv("AGENTLOOP_VLLM", str(engine_executable(tmp_path)))
    assert typed(made_small(text, model=qwen2), folder, monkeypatch) == 0, at
    assert "held-out success: " in capsys.readouterr().out
    (run,) = (folder / "runs").iterdir()
    assert rows(run / "replay.sqlite", "select count(*) from iterations") == [(3,)]
    assert (run / "report.html").is_file()


@pytest.mark.parametrize(("place", "command"), RESUMING)
def test_resuming_command_goes_on(
    place: str,
    command: str,
    tmp_path: Path,
    trained: Path,
    qwen2: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "checkout"
    shutil.copytree(trained, folder, symlinks=True)
    iterations = 4 if "run.iterations=" in command else 3
    assert typed(made_small(command, model=qwen2, iterations=iterations), folder, monkeypatch) == 0, place
    assert rows(folder / DATABASE, "select count(*) from iterations") == [(iterations,)]
    assert "resumed runs/quickstart-001 after iteration 3" in capsys.readouterr().out


@pytest.mark.parametrize(("place", "command"), LOOKING)
def test_looking_answers(place: str, command: str, trained: Path, qwen2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ((trajectory, task),) = rows(trained / DATABASE, "select id, task from trajectories limit 1")
    before = (trained / DATABASE).read_bytes()
    words = made_small(command, model=qwen2, trajectory=trajectory, task=task)
    assert typed(words, trained, monkeypatch) == 0, place
    assert (trained / DATABASE).read_bytes() == before


def test_storing_commands_store(tmp_path: Path, trained: Path, qwen2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one document exports, it imports."""
    folder = tmp_path / "checkout"
    shutil.copytree(trained, folder, symlinks=True)
    for place, command in [pair for pair in LOOKING if pair[1].startswith("agentloop replay export")] + STORING:
        words = [*made_small(command, model=qwen2), *(["--force"] if " export " in command else [])]
        assert typed(words, folder, monkeypatch) == 0, place


@pytest.mark.parametrize(("place", "command"), SQL)
def test_sql_command_answers(place: str, command: str, trained: Path) -> None:
    _, database, query = shlex.split(command, comments=True)
    with sqlite3.connect(f"file:{trained / database}?mode=ro", uri=True) as connection:
        assert connection.execute(query).fetchall(), place
