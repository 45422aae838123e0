import json
import re
from collections.abc import Iterator
from contextlib import closing
from html import unescape
from pathlib import Path

import pytest

from replay.open_buffer import open_buffer
from replay.pages.addresses import address
from replay.pages.app import create_app, create_folder_app
from replay.pages.views.runs_page import OpenedRuns
from tests.fakes.records import RUN, a_run, iterate, new_store, put, sql, trajectory
from tests.fakes.replay_command import ask
from tests.replay.pages.serving import Served, charts_of, page_addresses, served, words_of

ODD = "b%2F c?"
"""A folder's name that no address can hold as it is."""


def add_run(folder: Path, iterations: int, success: float) -> None:
    folder.mkdir(parents=True)
    with closing(new_store(folder / "replay.sqlite")) as store:
        for iteration in range(1, iterations + 1):
            iterate(store, iteration, count=2)
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
        store.add_run(a_run("import-1"))
        put(store, trajectory("theirs", group="theirs", run="import-1"))
    (folder / "damaged").mkdir()
    (folder / "damaged" / "replay.sqlite").write_text("no database")
    (folder / "notes").mkdir()
    return folder


@pytest.fixture
def inspector(runs: Path) -> Iterator[Served]:
    with closing(OpenedRuns(runs)) as opened, served(create_folder_app(opened)) as server:
        yield server


def charts(html: str) -> dict[str, dict[str, list[list[float]]]]:
    panels = charts_of(html).values()
    return {panel["title"]: {curve["label"]: curve["points"] for curve in panel["curves"]} for panel in panels}


def listed(html: str) -> list[list[str]]:
    rows = re.findall(r'<tr data-href="[^"]*"[^>]*>(.*?)</tr>', html, re.S)
    return [[unescape(re.sub(r"<[^>]*>", "", cell)).strip() for cell in re.findall("<td.*?</td>", row)] for row in rows]


def test_every_run_is_listed_with_what_it_came_to_and_their_curves_stand_in_the_same_charts(inspector: Served) -> None:
    html = inspector.page("/")
    # The import in one run's folder is none of its own.
    got = sorted((row[2], row[5], row[6], row[8]) for row in listed(html))
    assert got == [("a", "2", "50.0\u00a0%", "16"), (ODD, "3", "37.5\u00a0%", "24")]
    assert "must be a readable SQLite" in unescape(html)
    found = charts(html)
    assert found["Success, held-out"] == {"a": [[1, 0.25], [2, 0.5]], ODD: [[1, 0.125], [2, 0.25], [3, 0.375]]}
    assert found["Reward"] == {"a": [[1, 0.5], [2, 0.5]], ODD: [[1, 0.5], [2, 0.5], [3, 0.5]]}
    assert charts(inspector.page(f"/?show=a:{RUN}"))["Reward"].keys() == {"a"}
    both = inspector.page(address(show=[f"a:{RUN}", f"{ODD}:{RUN}"]))
    assert '<td class="text">trajectories</td><td>16</td><td>24</td>' in both
    assert "The same in every key." in both
    # The only task: groups of each iteration have 2 and 1 successes of 4.
    assert re.search(r"Tasks.* task-1 [25.%→ 0]+best 50.0 % [25.%→ 0]+best 50.0 % 1 of 1 tasks", words_of(both))


def test_runs_of_a_database_are_compared_on_the_same_page(runs: Path) -> None:
    with open_buffer(str(runs / ODD / "replay.sqlite")) as source, served(create_app(source)) as server:
        html = server.page(f"/?all=1&show={RUN}&show=import-1")
        assert [row[2].split()[0] for row in listed(html)] == ["quickstart-001"] * 2
        assert f"quickstart-001 {RUN}" in charts(html)["Reward"]
        assert server.ask("/").status == 200


def test_run_that_goes_on_is_asked_again(inspector: Served, runs: Path) -> None:
    assert charts(inspector.page("/"))["Reward"]["a"][-1] == [2, 0.5]
    with closing(new_store(runs / "a" / "replay.sqlite")) as store:
        iterate(store, 3, count=2)
        store.add_metrics(RUN, 3, {"rollout/reward": 1.0})
    after = inspector.page("/")
    assert charts(after)["Reward"]["a"][-1] == [3, 1.0]
    assert [row[8] for row in listed(after) if row[2] == "a"] == ["24"]


def test_every_link_of_a_run_stays_with_it(inspector: Served, runs: Path) -> None:
    ((row, its_task),) = sql(runs / ODD / "replay.sqlite", "select id, task from trajectories where slot = 0 limit 1")
    below = address("in", ODD)
    assert below == "/in/b%25252F%2520c%253F"
    for target in page_addresses((RUN, "import-1"), str(its_task), [str(row)] * 2):
        answer = inspector.ask(below + ("/" + target if target.startswith("?") else target))
        if answer.status == 303:
            assert str(answer.header("location")).startswith(below), target
            continue
        assert answer.status == 200, (target, answer.text)
        links = {unescape(link) for link in re.findall(r'(?:href|src|action|hx-get)="(/[^"#]*)', answer.text)}
        leaving = {link for link in links if not link.startswith((f"{below}/", "/static/"))}
        assert leaving <= {"/", "/?all=1", below}, target


def test_what_is_not_there_is_one_line(inspector: Served, runs: Path) -> None:
    for name in ("nobody", "notes", "..", "%252E%252E", "a%252F..%252Fa"):
        assert inspector.ask(f"/in/{name}/buffer").status == 404, name
    many = "&".join(f"show=a:{at}" for at in range(15))
    for target, status, problem in (
        ("/in/damaged/buffer", 503, "must be a readable SQLite"),
        ("/?show=a:nobody", 400, "show must name runs of the list, got 'a:nobody'"),
        (f"/?{many}", 400, "show must be given at most 14 times, got 15"),
    ):
        found, text = inspector.problem(target)
        assert (found, problem in text) == (status, True), text
    refused = f"agentloop: RUN must be one run, got {runs}, a folder of runs. See: agentloop inspect {runs}\n"
    result = ask("stats", runs)
    assert (result.exit_code, result.stderr) == (2, refused)
