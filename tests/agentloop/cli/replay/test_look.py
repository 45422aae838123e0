"""`agentloop replay stats | ls | show`, and which buffer they are about."""

import io
import json
import os
import unicodedata
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers

from agentloop.cli.replay.token_view import token_view
from context import TokenSequence, default_authors
from context.messages import Message
from context.tokens.token_sequence import Segment
from replay.locate import is_folder_of_runs, newest_run_folder, place
from replay.records import HINDSIGHT, TaskRecord
from replay.storage.databases import Location
from replay.storage.format import schema
from tests.fakes.databases import Databases
from tests.fakes.families import family
from tests.fakes.records import (
    RUN,
    SHORT,
    Fresh,
    a_run,
    group,
    iterated,
    new_store,
    planned_row,
    put,
    sql,
    task,
    tokens,
    trajectory,
)
from tests.fakes.replay_command import ask

TITLES = (
    "id iter task reward success turns tools errors tokens stop advantage uses stale drift gap state prompt last answer"
)
USES = "select iteration, slot, stream from draws where trajectory = ? order by 1, 2"


@pytest.fixture(scope="module")
def run(databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three iterations of 8 rows, 3 of them successes; up to 3 successes drawn in the second and the third."""
    folder = tmp_path_factory.mktemp("runs") / "quickstart-001"
    (folder / "start").mkdir(parents=True)
    known = ["zero", "one", "two", "three", "four", "sys", "hello", "look", "up", "found", "done"]
    tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(known)}, unk_token="zero"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "start" / "tokenizer.json"))
    buffer = databases.new(folder / "replay.sqlite")
    if not databases.is_sqlite:
        (folder / "run.json").write_text(json.dumps({"id": RUN, "config": {"replay": {"database": buffer}}}))
    iterated(buffer, sampler="success", count=3).close()
    return folder


def buffer_of(run: Path) -> Location:
    return place(str(run))[0]


def used_lines(output: str) -> list[tuple[str, ...]]:
    """Iteration, slot and stream of each update that `show` prints."""
    titles, *uses = output[output.index("every update that used it") :].splitlines()[1:]
    named = "iter slot stream probability stale advantage drift gap weight share kl clipped"
    assert titles.split() == named.split()
    return [tuple(line.split()[:3]) for line in uses if not line.startswith("iteration ")]


def test_stats_of_a_folder_or_its_database_say_what_is_there_and_what_was_drawn(run: Path) -> None:
    output = ask("stats", str(run)).output
    for line in (
        "trajectories  24 in 6 groups of 1 task",
        "tokens        144, of which sampled 72",
        "success       37.5 %",  # 3 of 8 rows
        # Sampled by policies 0, 1 and 2, of which 3 is the newest.
        "staleness     2.0 on average, 3 at most, of 24 rows that can be drawn",
        "24 fresh, 6 replayed",
    ):
        assert line in output
    answer = json.loads(ask("stats", str(buffer_of(run)), "--json").output)
    assert answer["trajectories"] == sql(buffer_of(run), "select count(*) from trajectories")[0][0] == 24


def test_stats_count_rows_of_each_source(tmp_path: Path) -> None:
    with closing(new_store(tmp_path / "replay.sqlite")) as store:
        made = [trajectory("made", slot=2, source=HINDSIGHT), trajectory("made too", slot=3, source=HINDSIGHT)]
        sampled = [trajectory("won"), trajectory("lost", slot=1, success=False, reward=0.0)]
        put(store, *sampled, *made)
    printed = [line.split() for line in ask("stats", tmp_path / "replay.sqlite").stdout.splitlines()]
    assert ["hindsight", "2,", "100.0", "%", "successful"] in printed
    assert ["self", "2,", "50.0", "%", "successful"] in printed


def test_show_prints_the_requests_of_a_session(tmp_path: Path) -> None:
    with closing(new_store(tmp_path / "replay.sqlite")) as store:
        put(store, planned_row("agents"))
    printed = [line.split() for line in ask("show", "agents", tmp_path / "replay.sqlite").stdout.splitlines()]
    assert ["2", "│", "●", "searcher", "new", "trained", "5", "31", "6", "0"] in printed
    assert ["4", "●", "planner", "edited,", "from", "0", "trained", "14", "22", "7", "2"] in printed
    assert ["6", "●", "gone", "new", "undelivered", "3", "16", "5", "-"] in printed


def test_ls_prints_a_line_each_sorts_filters_and_prints_json(run: Path) -> None:
    titles, *lines = ask("ls", str(run), "--failed", "--limit", "3").stdout.splitlines()
    assert (" ".join(titles.split()), len(lines)) == (TITLES, 3)
    for line in lines:
        # Newest first: sampled by policy 2, and the newest policy is 3.
        id, *rest = line.split()
        shown = ["3", "task-1", "0", "no", "2", "1", "-", "6", "final", "+0.50", "0", "1", "1.100", "1.50", "eligible"]
        assert (len(id), rest[: len(shown)]) == (12, shown)
        assert line.endswith("'Where is the key?'  'in the drawer'")
    first = ask("ls", str(run), "--sort", "uses", "--success", "--limit", "5", "--json")
    assert first.stderr == "there are further rows: raise --limit\n"
    rows = json.loads(first.stdout)
    assert [row["success"] for row in rows] == [True] * 5
    assert [row["uses"] for row in rows] == sorted((row["uses"] for row in rows), reverse=True)
    rows = json.loads(ask("ls", str(run), "--where", "iteration == 2 and not success", "--json").output)
    plain = "select id from trajectories where iteration = 2 and not success"
    assert len(rows) == 5 and {row["id"] for row in rows} == {id for (id,) in sql(buffer_of(run), plain)}


def test_show_prints_facts_tokens_authors_log_probs_and_uses(run: Path) -> None:
    id = json.loads(ask("ls", str(run), "--sort", "uses", "--limit", "1", "--json").stdout)[0]["id"]
    output = ask("show", id[:9], str(run)).output
    for line in (id, "llm · 2 tokens · trained", "env · 1 tokens · not sampled"):
        assert line in output
    assert "look[-0.50]up[-1.00]" in output.replace(" ", "")
    assert used_lines(output) == [tuple(map(str, row)) for row in sql(buffer_of(run), USES, id)]
    ((id,),) = sql(buffer_of(run), "select id from trajectories where iteration = 1 and slot = 3")
    printed = ask("show", run, id).stdout  # or in the order of other commands
    assert 'payload     {"hops": 2, "store": {"k1": "drawer"}}\n' in printed
    assert "group       member 4 of 4, " in printed


def test_show_without_a_tokenizer_prints_ids_and_of_a_row_that_went_its_numbers(tmp_path: Path) -> None:
    path = tmp_path / "replay.sqlite"
    with closing(iterated(path, 1)) as store:
        ((used,),) = sql(store, "select id from trajectories where slot = 0")
        segments = (Segment(tokens([41, 42], ["user", "llm"])), Segment(tokens([43], ["llm"]), "clipped"))
        said = (Message("assistant", "a", author="llm", reward=0.5), Message("user", "b"), Message("assistant", "c"))
        row = trajectory("abc", segments=segments, group="g2", task="t2", messages=said)
        store.append([task("t2")], [group("g2", task="t2")], [row])
        output = ask("show", "abc", path).output
        assert "of replies  rewards 0.5 -\n" in output
        assert "42 [-0.50]" in output and "segment 1 (clipped)" in output and "no update used it" in output
        store.prune(rows=schema.trajectories.c.id == "abc", dry_run=False)
    assert "gone with the last row of the task" in ask("show", "abc", path).stdout
    ask("forget", path, "--where", f"id == '{used}'", "--yes")
    output = ask("show", used, path).output
    assert "evicted (forgotten)" in output and "its tokens are gone" in output
    assert used_lines(output) == [tuple(map(str, row)) for row in sql(path, USES, used)]
    answer = json.loads(ask("show", used, path, "--json").output)
    assert (answer["state_reason"], answer["segments"], answer["messages"]) == ("forgotten", [], [])


EVIL = "\x1b]0;mine\x07\x1b[2J\x9b31m\u202e\u200b\ud800\rz\nfake line"
COMMANDS = ("stats", "ls", "show ID", "tasks", "lineage 1", "mix", "ls --where x==1")


def test_nothing_that_was_stored_acts_on_the_terminal(tmp_path: Path) -> None:
    names = {"ID": f"id{EVIL}", "OTHER": f"other{EVIL}", "TASK": f"task{EVIL}"}
    segments = (Segment(SHORT, f"reason{EVIL}"),)  # type: ignore[arg-type]  # as a file may have it
    given: dict[str, Any] = {"stop_reason": f"stop{EVIL}"}
    given |= {"environment": f"env{EVIL}", "environment_version": EVIL, "group": f"g{EVIL}", "task": names["TASK"]}
    with closing(new_store(tmp_path / "replay.sqlite")) as store:
        rows = [trajectory(names["ID"], segments=segments, **given), trajectory(names["OTHER"], slot=1, **given)]
        prompt = {"messages": [{"role": EVIL, "content": EVIL}]}
        store.append([TaskRecord(names["TASK"], EVIL, prompt)], [group(f"g{EVIL}", task=names["TASK"])], rows)
    sql(tmp_path / "replay.sqlite", "update runs set name = ?", "run\x1b[2J\u202e")
    for command in COMMANDS:
        result = ask(*(names.get(word, word) for word in command.split()), tmp_path / "replay.sqlite")
        shown = result.stdout + result.stderr
        assert shown and "Traceback" not in shown, command
        assert [c for c in shown if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co")] == [], command
        assert not any(line.startswith("fake line") for line in shown.splitlines()), command


# Lineage


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """A run folder with the checkpoints of iterations 2 and 3; that of 3 is not whole."""
    iterated(tmp_path / "replay.sqlite", count=3).close()
    for number in (2, 3):
        (tmp_path / "checkpoints" / f"{number:06d}" / "model").mkdir(parents=True)
    (tmp_path / "checkpoints" / "000002" / "COMPLETE").touch()
    return tmp_path


def test_lineage_and_show_name_checkpoints(checkpoints: Path) -> None:
    text = ask("lineage", "2", str(checkpoints)).output
    assert f"iteration 2 of run {RUN}: 8 fresh, 3 drawn, 2 optimizer steps" in text
    assert "collected by policy 1, made policy 2" in text
    assert f"in checkpoint {checkpoints}/checkpoints/000002" in text
    rows = [line.split() for line in text.splitlines()[5:16]]
    assert [row[1] for row in rows] == ["fresh"] * 8 + ["replay"] * 3
    ((id,),) = sql(checkpoints / "replay.sqlite", "select trajectory from draws where iteration = 2 and slot = 8")
    uses = ask("show", id, str(checkpoints)).output
    assert f"iteration 1 made policy 1, in {checkpoints}/checkpoints/000002" in uses
    answer = json.loads(ask("show", id, str(checkpoints), "--json").output)
    held = {use["iteration"]: use["held_by"] for use in answer["uses"]}
    assert {held[1], held[2]} == {f"{checkpoints}/checkpoints/000002"}
    # The checkpoint of iteration 3 is not whole.
    assert json.loads(ask("lineage", "3", str(checkpoints), "--json").output)["checkpoint"] is None


# Which buffer


@pytest.mark.parametrize("named", [["runs/new-001"], []])
def test_run_that_warms_up_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: list[str]) -> None:
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
        store.add_run(a_run("run-2"))
        Fresh(1, size=2).append_to(store)
        Fresh(1, size=3, run="run-2").append_to(store)
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
def test_newest_run_is_that_whose_buffer_was_written_last(tmp_path: Path, written: dict[str, int], newest: str) -> None:
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


TABLE = default_authors()


def sequence(text: str, author: str, log_prob: float = np.nan) -> TokenSequence:
    tokens = TokenSequence.constant(family("chatml").codec.encode_text(text), TABLE.code(author))
    return replace(tokens, behavior_log_probs=np.full(len(tokens), log_prob, np.float32))


def test_view_underlines_only_trained_tokens() -> None:
    parts = [sequence("ab", "env"), sequence("ab", "llm", -1.0), sequence("ab", "llm(do_not_train)", -1.0)]
    view = token_view(TokenSequence.concatenate(parts), TABLE, family("chatml").codec)
    underlined = {view.plain[span.start : span.end] for span in view.spans if "underline" in str(span.style)}
    heads = [line for line in view.plain.splitlines() if "·" in line]
    assert underlined == {"ab"} or underlined == {"a", "b"}
    assert [line.rsplit(" · ")[-1] for line in heads] == ["not sampled", "trained", "sampled, not trained"]


def test_view_writes_out_what_would_act_on_a_terminal() -> None:
    text = "a\x1b[31mred\r\u202egnp\x07 [bold]b[/bold]"
    shown = sequence(text, "env")
    out = io.StringIO()
    Console(file=out, width=200, force_terminal=False).print(token_view(shown, TABLE, family("chatml").codec))
    assert "a<U+001B>[31mred<U+000D><U+202E>gnp<U+0007> [bold]b[/bold]" in out.getvalue()
