from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from replay.inspector.app import create_app
from replay.inspector.server.guard import Guard
from tests.replay.inspector.serving import Served, served

from replay import ReplayStore, queries
from replay.queries.open_buffer import OpenBuffer, open_buffer
from tests.fakes.records import RUN, group, new_store, policy, run_record, sql, task, trajectory

OTHER = "run-2"
CONFIG = {
    "run": {"seed": 7, "iterations": 4, "stop_at_success": 0.9},
    "replay": {"fraction": 0.25, "sampler": "success", "note": "<b>&'\u202e"},
}


def log(store: ReplayStore, iteration: int, *, run: str = RUN, seconds: float = 2.0, **more: float) -> None:
    """As the loop does: with the update, and after its evaluation."""
    values = {
        "batch/fresh": 6.0,
        "batch/replay": 2.0,
        "batch/planned_replay": 2.0,
        "rollout/success": iteration / 10,
        "actor/fresh/pg_loss": -0.5 * iteration,
        "actor/replay/ess/age_2-3": 0.75,
        "rollout/stop/answered": 1.0,
    }
    store.add_metrics(run, iteration, values)
    store.add_metrics(run, iteration, {"time/iteration": seconds, **more})


def fill(store: ReplayStore, first: int, last: int) -> None:
    for iteration in range(first, last + 1):
        log(store, iteration)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text(json.dumps({"id": RUN, "config": {"replay": {}}}))
    return tmp_path


@pytest.fixture
def writer(folder: Path) -> Iterator[ReplayStore]:
    """A run after iteration 2 of 4, whose trainer still writes, beside another one."""
    with closing(new_store(folder / "replay.sqlite", run=OTHER)) as store:
        store.add_run(replace(run_record(), config=CONFIG))
        store.add_metrics(RUN, 0, {"eval/success": 0.125})
        log(store, 1)
        log(store, 2, **{"eval/success": 0.5})
        yield store


@pytest.fixture
def inspector(writer: ReplayStore, folder: Path) -> Iterator[Served]:
    reading = closing(ReplayStore.open(folder / "replay.sqlite", read_only=True))
    with reading as store, served(create_app(OpenBuffer(store, folder), Guard())) as server:
        yield server


def twin(inspector: Served, target: str) -> dict[str, Any]:
    answer = inspector.ask(target)
    assert answer.status == 200, answer.text
    found: dict[str, Any] = json.loads(answer.text)
    return found


def panels(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {panel["key"]: panel for group in found["groups"] for panel in group["panels"]}


def points(found: dict[str, Any], panel: str, label: str) -> list[list[float]]:
    (curve,) = [curve for curve in panels(found)[panel]["curves"] if curve["label"] == label]
    series: list[list[float]] = curve["points"]
    return series


# The page and its twin


def test_twin_holds_every_panel_with_its_series(inspector: Served) -> None:
    found = twin(inspector, f"/runs/{RUN}.json")
    assert [group["title"] for group in found["groups"]] == [
        "Is it learning?",
        "Is the update sound?",
        "How far has the policy moved from its data?",
        "What went into it?",
    ]
    assert points(found, "success", "held-out") == [[0, 0.125], [2, 0.5]]
    assert points(found, "policy-loss", "fresh") == [[1, -0.5], [2, -1.0]]
    assert points(found, "effective-sample-size-by-age", "2-3") == [[1, 0.75], [2, 0.75]]
    assert panels(found)["ratio"]["how"].startswith("Probability in the update over probability at the anchor")
    assert panels(found)["ratio"]["summary"] == "Ratio: not measured."
    assert found["config"] == CONFIG
    assert [row["iteration"] for row in found["iterations"]] == [2, 1]
    assert found["iterations"][0]["held_out"] == 0.5 and found["iterations"][1]["held_out"] is None


def test_page_shows_tiles_panels_iterations_and_configuration(inspector: Served) -> None:
    html = inspector.ask(f"/runs/{RUN}").text
    assert "<h1>quickstart-001</h1>" in html
    assert "seed 7 \u00b7 replay 25\u00a0%, success sampler \u00b7 ends at 90\u00a0% held-out success" in html
    assert "12.5 %" in html and "50.0 %" in html
    assert "2 of at most 4 iterations, 2.0 s each" in html
    assert html.count('<div class="chart"') == len(panels(twin(inspector, f"/runs/{RUN}.json"))) == 19
    assert html.count('<p class="how">') == 19
    assert f'<a href="/runs/{RUN}/iterations/2">2</a>' in html
    assert f'href="/buffer?run={RUN}&amp;where=not%20success"' in html
    assert f'href="/compare?runs={RUN}%2C{OTHER}"' in html
    assert "<b>&'" not in html and "&lt;b&gt;&amp;&#39;" in html  # of the configuration's note


def test_values_of_charts_can_not_end_their_element(writer: ReplayStore, inspector: Served) -> None:
    writer.add_metrics(RUN, 2, {"rollout/stop/</script><script>alert(1)</script>": 0.5})
    html = inspector.ask(f"/runs/{RUN}").text
    (text,) = re.findall(r'<script type="application/json" id="charts">(.*?)</script>', html, re.S)
    (curve,) = json.loads(text)["episodes-cut-short"]["curves"]
    assert curve["label"] == "</script><script>alert(1)</script>"


def test_page_of_an_unknown_run_says_so(inspector: Served) -> None:
    assert inspector.ask("/runs/nobody").status == 404
    assert "error" in json.loads(inspector.ask("/runs/nobody.json").text)


# Live


def test_address_of_a_poll_is_a_page_too(inspector: Served) -> None:
    mark = twin(inspector, f"/runs/{RUN}.json")["progress"]["mark"]
    for more in ("", f"&mark={mark}"):
        assert inspector.ask(f"/runs/{RUN}?after=1{more}").status == 200


def test_poll_brings_what_came_after_and_nothing_where_nothing_did(writer: ReplayStore, inspector: Served) -> None:
    mark = twin(inspector, f"/runs/{RUN}.json")["progress"]["mark"]
    assert twin(inspector, f"/runs/{RUN}.json?after=1&mark={mark}")["groups"] == []
    log(writer, 3)
    found = twin(inspector, f"/runs/{RUN}.json?after=1&mark={mark}")
    assert points(found, "policy-loss", "fresh") == [[2, -1.0], [3, -1.5]]
    assert [row["iteration"] for row in found["iterations"]] == [3, 2]
    assert "config" not in found
    # An evaluation comes after its iteration, and is brought too.
    late = found["progress"]["mark"]
    writer.add_metrics(RUN, 3, {"eval/success": 0.75})
    found = twin(inspector, f"/runs/{RUN}.json?after=2&mark={late}")
    assert points(found, "success", "held-out") == [[3, 0.75]]


def test_long_run_is_told_in_points_of_several_iterations(writer: ReplayStore, inspector: Served) -> None:
    fill(writer, 3, 600)
    writer.add_metrics(RUN, 300, {"actor/fresh/ratio_max": 9.0, "eval/success": 0.75})
    found = twin(inspector, f"/runs/{RUN}.json")
    loss = points(found, "policy-loss", "fresh")
    assert found["merged"] == 4 and all(panel["merged"] == 4 for panel in panels(found).values())
    assert loss == [[first, -0.5 * (first + 1.5)] for first in range(1, 601, 4)]
    assert points(found, "largest-ratio", "fresh") == [[297, 9.0]]
    # What happened before training, the tiles and the newest iterations stay as they were.
    assert points(found, "success", "held-out")[:2] == [[0, 0.125], [1, 0.5]]
    assert found["tiles"][1]["note"] == "600 iterations, 2.0 s each, evaluations not counted"
    assert found["tiles"][2]["streams"] == [3600.0, 1200.0]
    assert [row["iteration"] for row in found["iterations"]] == list(range(600, 588, -1))
    assert ">Each point is 4 iterations: their mean" in inspector.ask(f"/runs/{RUN}").text
    # A stretch of it is told closer.
    closer = twin(inspector, f"/runs/{RUN}.json?first=297&last=304")
    assert closer["merged"] == 1 and points(closer, "largest-ratio", "fresh") == [[300, 9.0]]
    assert points(closer, "policy-loss", "fresh") == [[at, -0.5 * at] for at in range(297, 305)]
    assert (closer["tiles"], closer["iterations"]) == (found["tiles"], found["iterations"])
    # A poll brings the point that an iteration is part of, whole.
    log(writer, 601)
    assert points(twin(inspector, f"/runs/{RUN}.json?after=600"), "policy-loss", "fresh") == [[601, -300.5]]
    log(writer, 602)
    assert points(twin(inspector, f"/runs/{RUN}.json?after=601"), "policy-loss", "fresh") == [[601, -300.75]]
    both = twin(inspector, f"/compare.json?runs={RUN},{OTHER}")
    assert points(both, "policy-loss", "A fresh")[:2] == loss[:2]
    assert ">Each point is 4 iterations: their mean" in inspector.ask(f"/compare?runs={RUN},{OTHER}").text


def state_of(writer: ReplayStore, folder: Path) -> dict[str, Any]:
    return queries.progress(writer, writer.run(RUN), folder)


def fall_silent(folder: Path, seconds: float) -> None:
    then = time.time() - seconds
    for file in folder.glob("replay.sqlite*"):
        os.utime(file, (then, then))


def test_run_that_wrote_a_moment_ago_is_live_and_one_that_fell_silent_has_stopped(
    writer: ReplayStore, folder: Path
) -> None:
    assert state_of(writer, folder)["state"] == "live"
    fall_silent(folder, 90)
    found = state_of(writer, folder)
    assert (found["state"], found["iteration"], found["iterations"]) == ("stopped", 2, 4)
    assert 90 <= found["seconds_since"] < 100
    # An iteration of 50 s may be under way for 4 x 50 s.
    log(writer, 3, seconds=50.0)
    fall_silent(folder, 90)
    assert state_of(writer, folder)["state"] == "live"


@pytest.mark.parametrize("name", ["shared.sqlite", "replay.sqlite"])
def test_runs_that_share_a_file_are_told_apart_by_what_each_published(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with closing(new_store(path, run=OTHER)) as store:
        store.add_run(replace(run_record(), config=CONFIG))
        store.add_policy(policy(0))
        sql(store, "update policies set created_at = '2026-01-02T03:04:05+00:00' where run = ?", RUN)
        store.add_run(replace(run_record("run-3"), config=CONFIG))
        store.add_policy(policy(0, run="run-3"))
    with open_buffer(str(path)) as source, served(create_app(source, Guard())) as server:
        found = [twin(server, f"/runs/{run}.json")["progress"] for run in (RUN, "run-3")]
    assert [each["state"] for each in found] == ["stopped", "live"]
    assert found[0]["seconds_since"] > 3600 > found[1]["seconds_since"]


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="the locks of this system can't be read")
def test_run_whose_folder_is_locked_is_live_however_long_it_is_silent(writer: ReplayStore, folder: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    with (folder / "lock").open("w") as lock:
        fall_silent(folder, 3600)
        assert state_of(writer, folder)["state"] == "stopped"
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert state_of(writer, folder)["state"] == "live"


def test_run_is_finished_after_its_iterations_or_twice_at_its_target(writer: ReplayStore, folder: Path) -> None:
    log(writer, 3, **{"eval/success": 0.9})
    assert state_of(writer, folder)["state"] == "live"
    log(writer, 4)
    assert state_of(writer, folder)["state"] == "finished"


def test_run_at_its_target_twice_is_finished_early(writer: ReplayStore, folder: Path) -> None:
    writer.add_metrics(RUN, 2, {"eval/success": 0.9})
    log(writer, 3, **{"eval/success": 0.95})
    assert state_of(writer, folder)["state"] == "finished"


def test_run_that_could_not_go_on_has_stopped_at_once(writer: ReplayStore, folder: Path) -> None:
    writer.add_metrics(RUN, 3, {"run/stopped": 1.0})
    assert state_of(writer, folder)["state"] == "stopped"


# All runs


def test_runs_are_listed_and_the_only_one_is_shown_instead(inspector: Served, tmp_path: Path) -> None:
    found = twin(inspector, "/index.json")["runs"]
    assert [(row["id"], row["iterations"], row["success"]) for row in found] == [(RUN, 0, 0.5), (OTHER, 0, None)]
    html = inspector.ask("/").text
    assert "50.0\u00a0%" in html and f'value="{OTHER}"' in html
    with (
        closing(new_store(tmp_path / "alone.sqlite")) as store,
        served(create_app(OpenBuffer(store), Guard())) as alone,
    ):
        assert alone.ask("/").header("location") == f"/runs/{RUN}"
        assert alone.ask("/?all=1").status == 200


# Two of them


@pytest.mark.parametrize("query", [f"runs={RUN},{OTHER}", f"runs={RUN}&runs={OTHER}", f"a={RUN}&b={OTHER}"])
def test_two_runs_are_laid_over_each_other(inspector: Served, query: str) -> None:
    found = twin(inspector, f"/compare.json?{query}")
    assert [row["run"] for row in found["runs"]] == [RUN, OTHER]
    curves = panels(found)["policy-loss"]["curves"]
    assert [(curve["label"], curve["dashed"], curve["points"]) for curve in curves] == [
        ("A fresh", False, [[1, -0.5], [2, -1.0]]),
        ("A replay", False, []),
        ("B fresh", True, []),
        ("B replay", True, []),
    ]
    assert found["config"]["run.seed"] == [7, 0]
    assert found["config"]["replay.fraction"] == [0.25, None]
    html = inspector.ask(f"/compare?{query}").text
    assert '<td class="text">replay.fraction</td><td>0.25</td><td>\u2013</td>' in html


def test_values_that_differ_do_not_look_alike(tmp_path: Path) -> None:
    configs = [
        {"run": {"seed": seed}, "optimizer": {"lr": lr}, "tasks": [seed]}
        for seed, lr in ((20240601, 1e-5), (20240602, 1.04e-5))
    ]
    with closing(new_store(tmp_path / "replay.sqlite", run="run-0")) as store:
        for run, config in zip((RUN, OTHER), configs, strict=True):
            store.add_run(replace(run_record(run), config=config))
        store.append([task()], [group(size=1200)], [trajectory(f"{n}", slot=n, member=n) for n in range(1200)])
        with served(create_app(OpenBuffer(store), Guard())) as server:
            html = server.ask(f"/compare?runs={RUN},{OTHER}").text
    assert '<td class="text">run.seed</td><td>20240601</td><td>20240602</td>' in html
    assert '<td class="text">optimizer.lr</td><td>1e-05</td><td>1.04e-05</td>' in html
    assert '<td class="text">tasks</td><td>[20240601]</td><td>[20240602]</td>' in html
    assert '<td class="text">trajectories</td><td>1,200</td><td>0</td>' in html


@pytest.mark.parametrize(("query", "told"), [("runs=run-1", "got 1."), ("runs=run-1,nobody", "got 'nobody'.")])
def test_runs_that_are_not_two_of_this_database_are_refused_by_name(inspector: Served, query: str, told: str) -> None:
    answer = inspector.ask(f"/compare.json?{query}")
    message = json.loads(answer.text)["error"]
    assert answer.status == 400
    assert f"runs must name two runs of this database (run-1, run-2), {told}" in message
    assert "Runs of other databases: agentloop replay diff A B" in message
