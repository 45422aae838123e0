from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from replay import ReplayStore
from tests.fakes.records import RUN, new_store, run_record, sql
from tests.fakes.replay_command import ask
from tests.replay.storage.collecting.episodes import claim, collect, issue


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A worker has finished one of four episodes, failed one and holds one."""
    path = tmp_path / "replay.sqlite"
    with closing(new_store(path)) as store:
        issue(store, [0, 1])
        collect(store, 1)
        store.tickets.fail(claim(store, "worker-2"), "the engine gave no reply")
        claim(store, "worker-2")
        store.roles.lead(RUN, "learner-1", lease_s=600.0)
        store.roles.report("worker", RUN, "worker-2", {"host": "node-1\x1b[2J", "pid": 4711, "done": 1})
        store.roles.report(
            "engine", RUN, "http://node-0:8801", {"state": "serving", "version": 3, "difference": 1.5e-5}
        )
    return path


def test_cluster_says_who_waits_and_where_every_episode_is(database: Path) -> None:
    result = ask("cluster", str(database))
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].startswith("The learner waits for 1 of 2 groups of batch 1; the oldest episode was issued ")
    assert lines[0].endswith(" ago and is with worker-2.")
    assert "done        1 = 0 fresh + 0 late + 0 unused + 0 waiting + 1 open: adds up" in lines
    assert "tickets     1 queued, 1 leased, 1 done, 1 failed, 0 revoked; 0 claimed more than once" in lines
    assert any(line.split() == ["1", "failed", "the", "engine", "gave", "no", "reply"] for line in lines)
    (worker,) = [line for line in lines if line.startswith("worker-2")]
    assert worker.split()[:8] == ["worker-2", "node-1<U+001B>[2J", "4711", "-", "1", "-", "1", "-"]
    (engine,) = [line for line in lines if line.startswith("http://node-0:8801")]
    assert engine.split()[:6] == ["http://node-0:8801", "serving", "3", "-", "-", "1.5e-05"]


def test_cluster_says_what_would_help(database: Path) -> None:
    sql(database, "update workers set seen_at = seen_at - 80")
    lines = ask("cluster", str(database)).output.splitlines()
    assert "and no worker has reported for" in lines[0]
    assert lines[1] == "  agentloop worker --run RUN"


def test_cluster_shows_a_lost_row(database: Path) -> None:
    sql(database, "update tickets set state = 'done' where state = 'failed'")
    text = ask("cluster", str(database)).output
    assert "done        2 = 0 fresh + 0 late + 0 unused + 0 waiting + 1 open: DOES NOT ADD UP: the sum is 1" in text


def test_cluster_of_a_run_of_the_loop_is_one_line(tmp_path: Path) -> None:
    new_store(tmp_path / "replay.sqlite").close()
    text = ask("cluster", str(tmp_path / "replay.sqlite")).output
    assert text == "No ticket has been issued: the training process collects by itself.\n"


def test_cluster_names_a_run_of_several(database: Path) -> None:
    with closing(ReplayStore.open(database)) as store:
        store.add_run(run_record("run-2"))
    assert ask("cluster", str(database)).exit_code == 2
    answer = json.loads(ask("cluster", str(database), "--run", RUN, "--json").output)
    assert (answer["run"], answer["counts"]["open"], answer["counts"]["adds_up"]) == (RUN, 1, True)
