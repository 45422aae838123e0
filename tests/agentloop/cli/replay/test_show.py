from __future__ import annotations

import json
import unicodedata
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from context.tokens.token_sequence import Segment
from replay import ReplayStore, questions
from replay.records import HINDSIGHT, TaskRecord
from replay.sampling.samplers import make_sampler
from replay.storage.format import schema
from tests.fakes.records import SHORT, group, iterate, new_store, sql, task, trajectory
from tests.fakes.replay_command import ask


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three iterations of 8 rows, 3 of them successes; up to 3 successes drawn in the second and the third."""
    path = tmp_path_factory.mktemp("run") / "replay.sqlite"
    store = new_store(path)
    sampler = make_sampler("success", 3)
    for iteration in range(1, 4):
        iterate(store, iteration, sampler, count=3)
    store.close()
    return path


def test_ls_lists_what_the_filter_holds_for(database: Path) -> None:
    rows = json.loads(ask("ls", str(database), "--where", "iteration == 2 and not success", "--json").output)
    plain = "select id from trajectories where iteration = 2 and success = 0"
    assert {row["id"] for row in rows} == {id for (id,) in sql(database, plain)}
    assert len(rows) == 5


def test_summary_of_a_filter_counts_its_rows_groups_and_draws(database: Path) -> None:
    store = ReplayStore.open(database, read_only=True)
    answer = questions.summary(store, filter="iteration == 1 and success")
    assert (answer["trajectories"], answer["groups"], answer["successes"]) == (3, 2, 3)
    plain = (
        "select stream, count(*) from draws join trajectories on trajectories.id = trajectory "
        "where trajectories.iteration = 1 and success group by 1"
    )
    streams = dict(sql(database, plain))
    assert (answer["draws"]["fresh"], answer["draws"]["replay"]) == (streams["fresh"], streams.get("replay", 0))
    assert questions.summary(store, filter="reward >= 0") == questions.summary(store)
    store.close()


def test_stats_tell_rows_of_several_sources_apart(tmp_path: Path) -> None:
    with closing(new_store(tmp_path / "replay.sqlite")) as store:
        made = [trajectory("made", slot=2, source=HINDSIGHT), trajectory("made too", slot=3, source=HINDSIGHT)]
        sampled = [trajectory("won"), trajectory("lost", slot=1, success=False, reward=0.0)]
        store.append([task("task-1")], [group("group-1")], [*sampled, *made])
        answer = questions.summary(store)["sources"]
    assert {source: (row["trajectories"], row["successes"]) for source, row in answer.items()} == {
        "hindsight": (2, 2),
        "self": (2, 1),
    }
    printed = [line.split() for line in ask("stats", tmp_path / "replay.sqlite").stdout.splitlines()]
    assert ["hindsight", "2,", "100.0", "%", "successful"] in printed
    assert ["self", "2,", "50.0", "%", "successful"] in printed


EVIL = "\x1b]0;mine\x07\x1b[2J\x9b31m\u202e\u200b\ud800\rz\nfake line"


COMMANDS = ("stats", "ls", "show ID", "tasks", "lineage ID", "lineage 1", "mix", "ls --where x==1")


def test_nothing_that_was_stored_acts_on_the_terminal(tmp_path: Path) -> None:
    names = {"ID": f"id{EVIL}", "OTHER": f"other{EVIL}", "TASK": f"task{EVIL}"}
    segments = (Segment(SHORT, f"reason{EVIL}"),)  # type: ignore[arg-type]  # as a file may have it
    given: dict[str, Any] = {"stop_reason": f"stop{EVIL}", "error_kind": f"error{EVIL}"}
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


def test_show_prints_the_payload(database: Path) -> None:
    ((id,),) = sql(database, "select id from trajectories where iteration = 1 and slot = 3")
    printed = ask("show", id, database).stdout
    assert 'payload     {"hops": 2, "store": {"k1": "drawer"}}\n' in printed
    assert "group       member 4 of 4, " in printed


def test_payload_that_went_with_its_rows_is_told(tmp_path: Path) -> None:
    with closing(new_store(tmp_path / "replay.sqlite")) as store:
        store.append([task()], [group()], [trajectory("a", policy_version_min=0)])
        store.prune(rows=schema.trajectories.c.id == "a", dry_run=False)
    assert "gone with the last row of the task" in ask("show", "a", tmp_path / "replay.sqlite").stdout
