import json
from contextlib import closing
from pathlib import Path

import pytest

from tests.fakes.families import family
from tests.fakes.records import iterate, new_store, sql
from tests.fakes.replay_command import ask


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "a").mkdir()
    with closing(new_store(tmp_path / "a" / "replay.sqlite")) as store:
        for iteration in (1, 2):
            iterate(store, iteration)
    return tmp_path / "a"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    (tmp_path / "b").mkdir()
    new_store(tmp_path / "b" / "replay.sqlite", "run-2").close()
    return tmp_path / "b"


@pytest.fixture
def file(run: Path, tmp_path: Path) -> Path:
    """All 16 rows of the run."""
    ask("export", run, tmp_path / "rows.jsonl")
    return tmp_path / "rows.jsonl"


def test_export_and_import_say_what_they_did(run: Path, other: Path, tmp_path: Path) -> None:
    file = tmp_path / "wins.parquet"
    # 2 iterations of 2 groups of 4, half and a quarter of them successes.
    assert ask("export", run, file, "--where", "success").output.startswith(f"6 rows in {file} (")
    answer = json.loads(ask("export", run, file, "--where", "success", "--force", "--json").output)
    assert answer == {"file": str(file), "rows": 6, "bytes": file.stat().st_size, "left_out": {}, "corrupt": {}}
    output = ask("import", file, other, "--name", "wins").output
    assert output == f"6 rows imported from {file}, 0 were there already, 0 bad rows left out\n"
    assert sql(other / "replay.sqlite", "select distinct source from trajectories") == [("wins",)]
    answer = json.loads(ask("import", file, other, "--keep-source", "--json").output)
    assert (answer["inserted"], answer["duplicates"], answer["bad"]) == (0, 6, 0)


def test_corrupt_rows_are_not_exported_and_bad_ones_not_imported(run: Path, other: Path, file: Path) -> None:
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], lines[1].replace('"stop_reason":', '"stop_reasons":'), *lines[2:]]) + "\n")
    result = ask("import", file, other)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"agentloop: {file}:2: row must hold known columns, got 'stop_reasons'.")
    summary = f"15 rows imported from {file}, 0 were there already, 1 bad rows left out\n{file}:2:"
    assert ask("import", file, other, "--skip-bad").output.startswith(summary)
    sql(run / "replay.sqlite", "update segments set tokens = zeroblob(9) where trajectory like '%-1-1-0-0-0'")
    result = ask("export", run, file, "--force")
    assert result.exit_code == 1 and "15 rows in" in result.output
    assert "corrupt, left out: 04738-run-1-1-0-0-0: tokens with a wrong header" in result.output


CHAT = [{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "n": 1}] * 2


def test_conversations_are_imported_with_what_is_odd_about_them(run: Path, tmp_path: Path) -> None:
    family("chatml").save(run / "start")
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in CHAT))
    output = ask("import", file, run, "--format", "openai-chat", "--reward", "1").output
    assert output.splitlines() == [
        f"2 rows imported from {file}, 0 were there already, 0 bad rows left out",
        "1 groups; 2 replies",
        "2 rows have advantage 0 (groups of one or of equal rewards) and teach nothing; give them one with --advantage",
        "fields not looked at: n",
        "source 'teacher' can give nothing: replay.sampler success gives none of its 2 rows a weight; uniform would.",
    ]
    answer = json.loads(ask("import", file, run, "--format", "openai-chat", "--reward", "1", "--json").output)
    assert (answer["inserted"], answer["duplicates"], answer["without_signal"]) == (0, 2, 2)
    assert len(answer["empty_sources"]) == 1
    output = ask("import", file, run, "--format", "openai-chat", "--reward", "1", "--advantage", "1").output
    assert output.splitlines()[-1] == "fields not looked at: n"
    assert ask("import", file, run, "--format", "openai-chat").exit_code == 2


def test_import_makes_a_new_database_and_equal_tokens_are_written_once(run: Path, file: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.sqlite"
    assert ask("import", file, new).output.startswith("16 rows imported from ")
    assert sql(new, "select count(*) from trajectories") == [(16,)]
    # All 16 rows have the tokens of the first.
    assert "left out: 15 of equal tokens" in ask("export", run, tmp_path / "once.jsonl", "--unique").output
