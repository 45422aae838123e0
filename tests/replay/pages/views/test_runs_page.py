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

from replay.pages.addresses import address
from replay.pages.app import create_app, create_folder_app
from replay.pages.opened_runs import OpenedRuns
from replay.questions.open_buffer import open_buffer
from replay.sampling.samplers import make_sampler
from tests.fakes.records import RUN, group, iterate, new_store, run_record, task, trajectory
from tests.fakes.replay_command import ask
from tests.replay.pages.serving import Served, served

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
    with closing(OpenedRuns(runs)) as opened, served(create_folder_app(opened)) as server:
        yield server


def page(inspector: Served, target: str = "/") -> str:
    response = inspector.ask(target)
    assert response.status == 200, response.text
    return response.text


def charts(html: str) -> dict[str, dict[str, list[list[float]]]]:
    """Points by title of the panel and name of the run."""
    found = json.loads(html.split('id="charts">')[1].partition("</script>")[0])
    return {panel["title"]: {curve["label"]: curve["points"] for curve in panel["curves"]} for panel in found.values()}


def listed(html: str) -> list[list[str]]:
    rows = re.findall(r'<tr data-href="[^"]*">(.*?)</tr>', html, re.S)
    return [[unescape(re.sub(r"<[^>]*>", "", cell)).strip() for cell in re.findall("<td.*?</td>", row)] for row in rows]


def test_every_run_is_listed_with_what_it_came_to_or_its_problem(inspector: Served) -> None:
    html = page(inspector)
    # The import beside one run is none of the folder's own.
    assert sorted((row[1], row[4], row[5], row[6]) for row in listed(html)) == [
        ("a", "2", "50.0\u00a0%", "16"),
        (ODD, "3", "37.5\u00a0%", "24"),
    ]
    assert "must be a readable SQLite" in unescape(html)


def test_curves_of_all_runs_stand_in_the_same_charts(inspector: Served) -> None:
    found = charts(page(inspector))
    assert found["Success, held-out"] == {"a": [[1, 0.25], [2, 0.5]], ODD: [[1, 0.125], [2, 0.25], [3, 0.375]]}
    assert found["Reward"] == {"a": [[1, 0.5], [2, 0.5]], ODD: [[1, 0.5], [2, 0.5], [3, 0.5]]}


def test_marked_runs_alone_are_shown_with_what_differs_between_them(inspector: Served) -> None:
    assert charts(page(inspector, f"/?show=a:{RUN}"))["Reward"].keys() == {"a"}
    both = page(inspector, address(show=[f"a:{RUN}", f"{ODD}:{RUN}"]))
    assert '<td class="text">trajectories</td><td>16</td><td>24</td>' in both
    assert "The same in every key." in both


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ("show=a:nobody", "show must name runs of the list, got 'a:nobody'"),
        ("&".join(f"show=a:{at}" for at in range(15)), "show must be given at most 14 times, got 15"),
    ],
)
def test_runs_that_can_not_be_shown_are_refused(inspector: Served, asked: str, problem: str) -> None:
    response = inspector.ask(f"/?{asked}")
    assert (response.status, problem in unescape(response.text)) == (400, True)


def test_runs_of_a_database_are_compared_on_the_same_page(runs: Path) -> None:
    with open_buffer(str(runs / ODD / "replay.sqlite")) as source, served(create_app(source)) as server:
        html = page(server, f"/?all=1&show={RUN}&show=import-1")
        assert [row[1].split()[0] for row in listed(html)] == ["quickstart-001"] * 2
        assert f"quickstart-001 {RUN}" in charts(html)["Reward"]
        assert server.ask("/").status == 200


def test_run_that_goes_on_is_looked_at_anew(inspector: Served, runs: Path) -> None:
    assert charts(page(inspector))["Reward"]["a"][-1] == [2, 0.5]
    with closing(new_store(runs / "a" / "replay.sqlite")) as store:
        iterate(store, 3, make_sampler("uniform", 0), count=2)
        store.add_metrics(RUN, 3, {"rollout/reward": 1.0})
    after = page(inspector)
    assert charts(after)["Reward"]["a"][-1] == [3, 1.0]
    assert [row[6] for row in listed(after) if row[1] == "a"] == ["24"]


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
        elif "/static/" not in link:
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


def test_other_commands_ask_for_one_run(runs: Path) -> None:
    result = ask("stats", runs)
    assert (result.exit_code, result.stderr) == (
        2,
        f"agentloop: RUN must be one run, got {runs}, a folder of runs. See: agentloop inspect {runs}\n",
    )
