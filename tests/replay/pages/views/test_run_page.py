import fcntl
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

from replay import ReplayStore, questions
from tests.fakes.records import RUN, a_run, new_store, sql
from tests.replay.pages.serving import Served, charts_of, inspecting, words_of
from tests.replay.storage.collecting.episodes import claim, issue

OTHER, OTHER_OF_WORKERS = "run-2", "run-3"
HERE, CLUSTER = f"/runs/{RUN}", f"/runs/{RUN}/cluster"
NAME = "<b>worker</b>\u202e'\""
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text(json.dumps({"id": RUN, "config": {"replay": {}}}))
    return tmp_path


@pytest.fixture
def writer(folder: Path) -> Iterator[ReplayStore]:
    """A run after iteration 2 of 4, whose trainer still writes, beside another one."""
    with closing(new_store(folder / "replay.sqlite", run=OTHER)) as store:
        store.add_run(replace(a_run(), config=CONFIG))
        store.add_metrics(RUN, 0, {"eval/success": 0.125})
        log(store, 1)
        log(store, 2, **{"eval/success": 0.5})
        yield store


@pytest.fixture
def inspector(writer: ReplayStore, folder: Path) -> Iterator[Served]:
    with inspecting(folder / "replay.sqlite", folder) as server:
        yield server


def points(html: str, panel: str, label: str) -> list[list[float]]:
    (curve,) = [curve for curve in charts_of(html)[panel]["curves"] if curve["label"] == label]
    series: list[list[float]] = curve["points"]
    return series


def iterations(html: str) -> list[int]:
    return [int(number) for number in re.findall(r'data-at="(\d+)"', html)]


def test_page_shows_tiles_curves_iterations_and_configuration(inspector: Served) -> None:
    html = inspector.page(HERE)
    assert "<h1>quickstart-001</h1>" in html
    assert "seed 7 \u00b7 replay 25\u00a0%, success sampler \u00b7 ends at 90\u00a0% held-out success" in html
    assert "12.5 %" in html and "50.0 %" in html
    assert "training time 4.0 s, 2 of at most 4 iterations, evaluations not counted" in html
    assert html.count('<div class="chart"') == html.count('<p class="how">') == len(charts_of(html)) == 23
    assert f'<a href="/runs/{RUN}/iterations/2">2</a>' in html
    assert f'href="/buffer?run={RUN}&amp;where=not%20success"' in html
    assert f'href="/?all=1&amp;show={RUN}&amp;show={OTHER}"' in html
    assert "<b>&'" not in html and "&lt;b&gt;&amp;&#39;" in html  # of the configuration's note
    assert points(html, "success", "held-out") == [[0, 0.125], [2, 0.5]]
    assert points(html, "policy-loss", "fresh") == [[1, -0.5], [2, -1.0]]
    assert points(html, "effective-sample-size-by-age", "2-3") == [[1, 0.75], [2, 0.75]]
    assert charts_of(html)["ratio"]["summary"] == "Ratio: not measured."
    assert iterations(html) == [2, 1]


def test_a_poll_brings_the_page_where_something_is_new_or_nothing(writer: ReplayStore, inspector: Served) -> None:
    (mark,) = re.findall('data-mark="([^"]*)"', inspector.page(HERE))
    assert inspector.ask(f"{HERE}?mark={mark}").status == 204
    log(writer, 3)
    html = inspector.page(f"{HERE}?mark={mark}")
    assert iterations(html) == [3, 2, 1]
    # An evaluation comes after its iteration, and is brought too.
    (later,) = re.findall('data-mark="([^"]*)"', html)
    writer.add_metrics(RUN, 3, {"eval/success": 0.75})
    assert points(inspector.page(f"{HERE}?mark={later}"), "success", "held-out")[-1] == [3, 0.75]


def state_of(writer: ReplayStore, folder: Path) -> dict[str, Any]:
    return questions.progress(writer, writer.run(RUN), folder)


def fall_silent(folder: Path, seconds: float) -> None:
    then = time.time() - seconds
    for file in folder.glob("replay.sqlite*"):
        os.utime(file, (then, then))


def test_run_is_live_stopped_or_finished_by_what_it_wrote_last(writer: ReplayStore, folder: Path) -> None:
    assert state_of(writer, folder)["state"] == "live"
    fall_silent(folder, 90)
    found = state_of(writer, folder)
    assert (found["state"], found["iteration"], found["iterations"]) == ("stopped", 2, 4)
    assert 90 <= found["seconds_since"] < 100
    # An iteration of 50 s may be under way for 4 x 50 s.
    log(writer, 3, seconds=50.0, **{"eval/success": 0.9})
    fall_silent(folder, 90)
    assert state_of(writer, folder)["state"] == "live"
    writer.add_metrics(RUN, 4, {"run/stopped": 1.0})  # it could not go on
    assert state_of(writer, folder)["state"] == "stopped"
    writer.roles.end_run(RUN)  # it ended early, as it was configured to
    assert state_of(writer, folder)["state"] == "finished"
    writer.roles.end_run(RUN, ended=False)
    log(writer, 4)  # all iterations are made
    assert state_of(writer, folder)["state"] == "finished"


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="the locks of this system can't be read")
def test_run_whose_folder_is_locked_is_live_however_long_it_is_silent(writer: ReplayStore, folder: Path) -> None:
    with (folder / "lock").open("w") as lock:
        fall_silent(folder, 3600)
        assert state_of(writer, folder)["state"] == "stopped"
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert state_of(writer, folder)["state"] == "live"


# Collected by workers


def test_cluster_shows_who_takes_part_and_no_longer_asks_once_the_run_has_ended(tmp_path: Path) -> None:
    with closing(new_store(tmp_path / "replay.sqlite")) as store, inspecting(tmp_path / "replay.sqlite") as server:
        store.add_run(replace(a_run(OTHER), config={"run": {"iterations": 4}}))
        store.add_run(a_run(OTHER_OF_WORKERS))
        store.roles.lead(RUN, "learner-1", lease_s=600.0)
        store.roles.report("worker", RUN, NAME, {"host": "node-1", "pid": 4711, "in_flight": 2, "done": 3, "failed": 1})
        store.roles.report("worker", OTHER_OF_WORKERS, "worker-2", {})
        engine = {"state": "serving", "version": 1, "label": "run-1@1", "adapter": None, "difference": 1.5e-5}
        store.roles.report("engine", RUN, "http://node-0:8801", engine)
        issue(store, [0])
        store.tickets.fail(claim(store, NAME), "<i>no reply</i>")
        html = server.page(CLUSTER)
        text = words_of(html)
        for part in (
            "Learner learner-1 : its lease holds for",
            "Training episodes: 0 done = 0 fresh + 0 late + 0 unused + 0 waiting + 0 open",
            "queued, 0 under way, 1 failed.",
            "1 of 1 reported within",
            "node-1 4711 – 2 – 3 1 –",  # state, in flight, at most, done, failed, tool errors
            "http://node-0:8801 serving 1 run-1@1 – 1.5e-05 –",
            "1 failed <i>no reply</i>",
        ):
            assert part in text, part
        assert "<b>worker" not in html and "&lt;b&gt;worker&lt;/b&gt;" in html and 'hx-trigger="every 3s"' in html
        sql(store, "update workers set seen_at = seen_at - 80")  # more than a lease
        assert "0 of 1 reported within" in server.words(CLUSTER)
        store.roles.end_run(RUN)
        html = server.page(CLUSTER)
        assert "hx-trigger" not in html and "The run has ended" in html
        # Only runs with workers have a cluster.
        assert f'href="{CLUSTER}"' in server.page(f"/runs/{RUN}")
        html = server.page(f"/runs/{OTHER}")
        assert "/cluster" not in html and "Collected by the training process itself" in html
        html = server.page(f"/runs/{OTHER}/cluster")
        assert "the training process collects by itself" in html and "<table" not in html and "hx-get" not in html
