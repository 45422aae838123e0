"""A folder of runs: one list, their curves in the same charts, and the pages of each below an address of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from replay.inspector.folder_app import create_folder_app
from replay.inspector.opened_runs import OpenedRuns
from replay.inspector.server.guard import Guard
from tests.replay.inspector.serving import Served, served

from replay.locate import is_folder_of_runs
from replay.sampling.samplers import make_sampler
from tests.fakes.records import RUN, group, iterate, new_store, run_record, task, trajectory
from tests.fakes.replay_command import ask

ODD = "b%2F c?"
"""A folder's name that no address can hold as it is."""


def add_run(folder: Path, iterations: int, success: float) -> None:
    folder.mkdir(parents=True)
    with closing(new_store(folder / "replay.sqlite")) as store:
        for iteration in range(1, iterations + 1):
            iterate(store, iteration, make_sampler("uniform", 0), count=2)
            batch = {"rollout/reward": 0.5, "batch/fresh": 6.0, "batch/replay": 2.0}
            store.add_metrics(RUN, iteration, {"eval/success": success * iteration, **batch})
    (folder / "run.json").write_text(json.dumps({"id": RUN, "config": {"replay": {}}}))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run of 2 iterations, one of 3 in an oddly named folder with an import beside it, and a damaged one."""
    folder = tmp_path / "runs"
    add_run(folder / "a", 2, 0.25)
    add_run(folder / ODD, 3, 0.125)
    with closing(new_store(folder / ODD / "replay.sqlite")) as store:
        store.add_run(run_record("import-1"))
        place = {"run": "import-1", "iteration": 1}
        store.append([task()], [replace(group("theirs"), **place)], [trajectory("theirs", group="theirs", **place)])
    (folder / "damaged").mkdir()
    (folder / "damaged" / "replay.sqlite").write_text("no database")
    (folder / "notes").mkdir()
    return folder


@pytest.fixture
def inspector(runs: Path) -> Iterator[Served]:
    with closing(OpenedRuns(runs)) as opened, served(create_folder_app(opened, Guard())) as server:
        yield server


def answer(inspector: Served, target: str = "/index.json") -> dict[str, object]:
    response = inspector.ask(target)
    assert response.status == 200, response.text
    return dict(json.loads(response.text))


def test_every_run_of_the_folder_is_listed_with_its_state_or_its_problem(inspector: Served) -> None:
    lines = {line["folder"]: line for line in answer(inspector)["runs"]}  # type: ignore[attr-defined]
    assert set(lines) == {"a", ODD, "damaged"}
    told = [(line["run"], line["success"], line["trajectories"]) for line in (lines["a"], lines[ODD])]
    # The import beside it is none of the folder's own.
    assert told == [(RUN, 0.5, 16), (RUN, 0.375, 24)]
    assert "must be a readable SQLite" in lines["damaged"]["problem"]


def test_curves_of_all_runs_stand_in_the_same_charts(inspector: Served) -> None:
    panels = answer(inspector)["panels"]
    found = {
        panel["title"]: {curve["label"]: curve["points"] for curve in panel["curves"]}
        for panel in panels  # type: ignore[attr-defined]
    }
    assert found == {
        "Held-out success": {"a": [[1, 0.25], [2, 0.5]], ODD: [[1, 0.125], [2, 0.25], [3, 0.375]]},
        "Reward": {"a": [[1, 0.5], [2, 0.5]], ODD: [[1, 0.5], [2, 0.5], [3, 0.5]]},
        "Replayed share": {"a": [[1, 0.25], [2, 0.25]], ODD: [[1, 0.25], [2, 0.25], [3, 0.25]]},
    }
    looks = {(curve["role"], curve["dashed"]) for curve in panels[0]["curves"]}  # type: ignore[index]
    assert looks == {("s0", False), ("s1", False)}


def test_marked_runs_alone_are_shown(inspector: Served) -> None:
    found = answer(inspector, f"/index.json?show=a:{RUN}")
    assert found["shown"] == [f"a:{RUN}"]
    assert [curve["label"] for curve in found["panels"][0]["curves"]] == ["a"]  # type: ignore[index]
    response = inspector.ask("/index.json?show=a:nobody")
    assert (response.status, "show must name runs of the list, as FOLDER:ID" in response.text) == (400, True)
    response = inspector.ask("/?" + "&".join(f"show=a:{at}" for at in range(15)))
    assert (response.status, "show must be given at most 14 times, got 15" in response.text) == (400, True)


def links(html: str) -> set[str]:
    return {unescape(link) for link in re.findall(r'(?:href|src|action|hx-get)="(/[^"#]*)', html)}


def test_every_link_of_a_run_stays_with_it(inspector: Served) -> None:
    """All pages that can be reached from the list, but for orders of their tables."""
    seen: set[str] = set()
    ahead = sorted(links(inspector.ask("/").text))
    assert any(link.startswith("/in/b%25252F%2520c%253F/runs/") for link in ahead), ahead
    while ahead:
        link = ahead.pop(0)  # nearest first
        seen.add(link.partition("?")[0] if "sort=" in link or "where=" in link else link)
        response = inspector.ask(link)
        assert response.status in (200, 303), (link, response.text)
        if response.status == 303:
            assert (response.header("location") or "").startswith(link.split("/runs")[0].rstrip("/")[:5])
        elif "/static/" not in link and "json" not in link:
            below = re.match("/in/[^/]+", link)
            found = {each for each in links(response.text) if "sort=" not in each and "where=" not in each}
            leaving = {each for each in found if below and not each.startswith(below[0])}
            assert leaving <= {"/", "/?all=1"} | {each for each in found if each.startswith("/static/")}
            ahead += sorted(each for each in found if each not in seen and each not in ahead and len(seen) < 40)
    assert {link.split("/")[3] for link in seen if link.startswith("/in/a/")} >= {
        "runs",
        "buffer",
        "trajectories",
        "tasks",
    }


def test_what_is_not_there_is_one_line(inspector: Served) -> None:
    for name in ("nobody", "notes", "..", "%252E%252E", "a%252F..%252Fa"):
        response = inspector.ask(f"/in/{name}/buffer")
        assert response.status == 404, name
    response = inspector.ask("/in/damaged/buffer")
    assert (response.status, "must be a readable SQLite" in unescape(response.text)) == (503, True)
    assert json.loads(inspector.ask("/in/nobody/buffer.json").text)["error"].startswith("There is no run in a folder")


def test_run_that_goes_on_is_looked_at_anew(inspector: Served, runs: Path) -> None:
    before = answer(inspector)
    with closing(new_store(runs / "a" / "replay.sqlite")) as store:
        iterate(store, 3, make_sampler("uniform", 0), count=2)
        store.add_metrics(RUN, 3, {"eval/success": 1.0})
    after = answer(inspector)
    lines = [{line["folder"]: line for line in each["runs"]}["a"] for each in (before, after)]  # type: ignore[attr-defined]
    assert [(line["success"], line["trajectories"]) for line in lines] == [(0.5, 16), (1.0, 24)]
    curve = next(c for c in after["panels"][0]["curves"] if c["label"] == "a")  # type: ignore[index]
    assert curve["points"][-1] == [3, 1.0]


def test_folder_of_runs_is_told_from_a_run(runs: Path) -> None:
    assert is_folder_of_runs(runs)
    assert not any(is_folder_of_runs(runs / name) for name in ("a", "notes", "nowhere"))


def test_other_commands_ask_for_one_run(runs: Path) -> None:
    result = ask("stats", runs)
    assert (result.exit_code, result.stderr) == (
        2,
        f"agentloop: RUN must be one run, got {runs}, a folder of runs. See: agentloop inspect {runs}\n",
    )
