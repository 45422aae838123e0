"""What can't be done is one line and exit code 2, and leaves everything as it was."""

import os
from contextlib import closing
from pathlib import Path

import pytest

from tests.fakes.records import iterated, put, sql, trajectory
from tests.fakes.replay_command import ask


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three iterations, one row of which is damaged."""
    folder = tmp_path_factory.mktemp("run")
    with closing(iterated(folder / "replay.sqlite")) as store:
        put(store, trajectory("damaged", slot=99))
        sql(store, "update segments set tokens = ? where trajectory = 'damaged'", bytes(40))
    return folder


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("stats nowhere", "database must be an existing file, got nothing at nowhere"),
        ("stats notes.txt", "database must be a readable SQLite file"),
        ("show zz RUN", "ID must be the beginning of one trajectory's id, got 'zz'"),
        ("show damaged RUN", "trajectory damaged must read back as it was written"),
        ("lineage 9 RUN", "iteration must be a committed one, from 1 to 3, got 9."),
        ("mix RUN --run nobody", "RUN must be one run of"),
        ("prune RUN", "prune must be given --where, got nothing"),
        ("forget RUN", "forget must be given --where or --held-out, got neither"),
        ("export RUN x.pt", "FILE must end in .jsonl"),
        ("export RUN README.md/a.jsonl", "FILE must be writable, got 'README.md/a.jsonl' (Not a directory)."),
        ("import x.jsonl RUN", "FILE must be readable, got 'x.jsonl' (No such file or directory)"),
        ("import x.jsonl RUN --reward 1", "--reward and --advantage must come with --format openai-chat"),
        ("import x.jsonl RUN --format openai-chat --keep-source", "--keep-source must come with exported rows"),
    ],
)
def test_refusal_is_one_line(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("no database" * 100)
    (tmp_path / "README.md").touch()
    before = (run / "replay.sqlite").read_bytes()
    result = ask(*(run if word == "RUN" else word for word in words.split()))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    assert result.stderr.startswith(f"agentloop: {said}")
    assert sorted(os.listdir(tmp_path)) == ["README.md", "notes.txt"]
    assert (run / "replay.sqlite").read_bytes() == before


@pytest.mark.parametrize("words", ["ls --limit 0", "ls --sort colour", "lst"])
def test_wrong_usage_exits_2(words: str) -> None:
    assert ask(*words.split()).exit_code == 2
