from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from context.tokens.token_sequence import Segment
from replay.locate import is_folder_of_runs, newest_run_folder, place
from replay.sampling.samplers import make_sampler
from replay.storage.databases import Location
from tests.fakes.databases import Databases
from tests.fakes.records import RUN, FreshRows, group, iterate, new_store, run_record, sql, task, tokens, trajectory
from tests.fakes.replay_command import ask

TITLES = "id iter task reward success turns tools tokens stop advantage uses stale drift most state prompt last answer"
USES = "select iteration, slot, stream from draws where trajectory = ?"


@pytest.fixture(scope="module")
def run(databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "quickstart-001"
    (folder / "start").mkdir(parents=True)
    known = ["zero", "one", "two", "three", "four", "sys", "hello", "look", "up", "found", "done"]
    words = {word: id for id, word in enumerate(known)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="zero"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "start" / "tokenizer.json"))
    buffer = databases.new(folder / "replay.sqlite")
    if not databases.is_sqlite:
        (folder / "run.json").write_text(json.dumps({"id": RUN, "config": {"replay": {"database": buffer}}}))
    store = new_store(buffer)
    sampler = make_sampler("success", 3)
    for iteration in range(1, 4):
        iterate(store, iteration, sampler, count=3)
    store.close()
    return folder


def buffer_of(run: Path) -> Location:
    return place(str(run))[0]


def test_stats_of_a_folder_or_its_database_say_what_is_there_and_what_was_drawn(run: Path) -> None:
    output = ask("stats", str(run)).output
    assert "trajectories  24 in 6 groups of 1 task" in output
    assert "tokens        144, of which sampled 72" in output
    # 3 of 8 rows are successes.
    assert "success       37.5 %" in output
    # Sampled by policies 0, 1 and 2, of which 3 is the newest.
    assert "staleness     2.0 on average, 3 at most, of 24 rows that can be drawn" in output
    assert "24 fresh, 6 replayed" in output
    buffer = buffer_of(run)
    answer = json.loads(ask("stats", str(buffer), "--json").output)
    assert answer["trajectories"] == sql(buffer, "select count(*) from trajectories")[0][0] == 24


def test_ls_prints_a_line_each_sorts_and_prints_json(run: Path) -> None:
    lines = ask("ls", str(run), "--failed", "--limit", "3").stdout.splitlines()
    assert " ".join(lines[0].split()) == TITLES
    assert len(lines) == 4
    for line in lines[1:]:
        # Newest first: sampled by policy 2, and the newest policy is 3.
        id, *rest = line.split()
        assert len(id) == 12
        told = ["3", "task-1", "0", "no", "2", "1", "6", "final", "+0.50", "0", "1", "1.100", "1.50", "eligible"]
        assert rest[: len(told)] == told
        assert line.endswith("'Where is the key?'  'in the drawer'")
    rows = json.loads(ask("ls", str(run), "--sort", "uses", "--success", "--json").stdout)
    assert [row["success"] for row in rows] == [True] * 9
    assert [row["uses"] for row in rows] == sorted((row["uses"] for row in rows), reverse=True)


def test_show_prints_tokens_authors_log_probs_and_uses(run: Path) -> None:
    id = json.loads(ask("ls", str(run), "--sort", "uses", "--limit", "1", "--json").stdout)[0]["id"]
    output = ask("show", id[:9], str(run)).output
    assert id in output
    assert "llm · 2 tokens · trained" in output
    assert "env · 1 tokens · not sampled" in output
    assert "look[-0.50]up[-1.00]" in output.replace(" ", "")
    uses = output[output.index("every update that used it") :].splitlines()[1:]
    assert uses[0].split()[:4] == ["iter", "slot", "stream", "share"]
    stored = sql(buffer_of(run), f"{USES} order by 1, 2", id)
    assert [tuple(line.split()[:3]) for line in uses[1:]] == [(str(i), str(s), stream) for i, s, stream in stored]


def test_show_without_a_tokenizer_prints_ids(tmp_path: Path) -> None:
    store = new_store(tmp_path / "replay.sqlite")
    segments = (Segment(tokens([41, 42], ["user", "llm"])), Segment(tokens([43], ["llm"]), "clipped"))
    store.append([task()], [group()], [trajectory("abc", segments=segments)])
    store.close()
    output = ask("show", "abc", str(tmp_path / "replay.sqlite")).output
    assert "42 [-0.50]" in output
    assert "segment 1 (clipped)" in output
    assert "no update used it" in output


@pytest.mark.parametrize("named", [["runs/new-001"], []])
def test_run_that_still_warms_up_is_told_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(["new-001", "zeta-001"]):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text(json.dumps({"id": name, "config": {"replay": {}}}))
        os.utime(tmp_path / "runs" / name / "run.json", (1e9 - age, 1e9 - age))
    result = ask("stats", *named)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("agentloop: RUN must have a buffer, got runs/new-001: a run makes it")


def test_run_folder_on_a_shared_database_shows_its_own_rows(location: Location, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    url = str(location) if "://" in str(location) else f"sqlite:///{location}"
    (folder / "run.json").write_text(json.dumps({"id": "run-2", "config": {"replay": {"database": url}}}))
    with closing(new_store(url)) as store:
        store.add_run(run_record("run-2"))
        FreshRows(1, size=2).append_to(store)
        FreshRows(1, size=3, run="run-2").append_to(store)
    assert "trajectories  3 in 1 group " in ask("stats", str(folder)).output
    assert "trajectories  5 in 2 groups" in ask("stats", url).output
    assert len(ask("ls", str(folder)).stdout.splitlines()) == 1 + 3


@pytest.mark.parametrize(
    ("written", "newest"),
    [
        ({"quickstart-002": 200, "strategies-001": 300, "a-009": 100}, "strategies-001"),
        ({"quickstart-009": 300, "quickstart-010": 300}, "quickstart-010"),  # of two at once the higher-numbered
        ({"a-001": 100, "on-a-server": 300, "c-001": 200}, "on-a-server"),
    ],
)
def test_newest_run_is_the_one_whose_buffer_was_last_written(
    tmp_path: Path, written: dict[str, int], newest: str
) -> None:
    (tmp_path / "notes").mkdir()
    for name, at in written.items():
        (tmp_path / name).mkdir()
        here = tmp_path / name / ("metrics.jsonl" if name == "on-a-server" else "replay.sqlite")
        here.touch()
        os.utime(here, (at, at))
        if name == "on-a-server":
            identity = tmp_path / name / "run.json"
            identity.write_text('{"id": "b", "config": {"replay": {"database": "postgresql:///x"}}}')
            os.utime(identity, (50, 50))
    assert newest_run_folder(tmp_path) == tmp_path / newest
    assert is_folder_of_runs(tmp_path)
    assert not any(is_folder_of_runs(tmp_path / name) for name in (newest, "notes", "nowhere"))
