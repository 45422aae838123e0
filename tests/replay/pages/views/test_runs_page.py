import json
import re
from collections.abc import Iterator
from contextlib import closing
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from replay.open_buffer import open_buffer
from replay.pages.addresses import address
from replay.pages.app import create_app, create_folder_app
from replay.pages.views.runs_page import OpenedRuns
from replay.storage.format import schema
from tests.fakes.records import RUN, a_run, iterate, new_store, put, sql, trajectory
from tests.fakes.replay_command import ask
from tests.replay.pages.serving import Served, charts_of, page_addresses, served

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
    # Both folders have a run of this id: the newest counts, and a run is shown once.
    assert charts(inspector.page(address(show=[RUN, f"{ODD}:{RUN}"])))["Reward"].keys() == {ODD}
    marked = [f"a:{RUN}", f"{ODD}:{RUN}"]
    both = inspector.page(address("differences", show=marked))
    page = unescape(inspector.page(address(show=marked)))
    assert address("differences", show=marked) in page and address("compared-tasks", show=marked) in page
    assert '<td class="text">trajectories</td><td>16</td><td>24</td>' in both
    assert "The same in every key." in both
    # The only task: groups of each iteration have 2 and 1 successes of 4. Its question is what it begins with.
    assert "mean over the 1 that all tried 50.0 % 50.0 % task-1 Where is the key? 50.0 % 50.0 % 1 of 1" in (
        inspector.words(address("compared-tasks", show=marked))
    )


def test_numbers_that_differ_have_separators_and_settings_are_as_in_a_configuration(
    inspector: Served, runs: Path
) -> None:
    sql(runs / "a" / "replay.sqlite", "update trajectories set num_action_tokens = 1000")
    sql(runs / "a" / "replay.sqlite", "update runs set config = ?", json.dumps({"context": {"max_tokens": 4096}}))
    words = inspector.words(address("differences", show=[f"a:{RUN}", f"{ODD}:{RUN}"]))
    assert "action_tokens 16,000 72" in words and "context.max_tokens 4096 \u2013" in words


def test_runs_of_a_database_are_compared_on_the_same_page(runs: Path) -> None:
    with open_buffer(str(runs / ODD / "replay.sqlite")) as source, served(create_app(source)) as server:
        html = server.page(f"/?all=1&show={RUN}&show=import-1")
        assert [row[2].split()[0] for row in listed(html)] == ["quickstart-001"] * 2
        assert f"quickstart-001 {RUN}" in charts(html)["Reward"]
        assert server.ask("/").status == 200


def reading_of(html: str) -> dict[str, Any]:
    """What the page's script needs to draw curves over another amount."""
    (text,) = re.findall(r'<script type="application/json" id="reading">(.*?)</script>', html)
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.mark.parametrize(
    ("amount", "spent"),
    [
        ("episodes", [[1, 7], [2, 1], [2, 7]]),
        ("generated tokens", [[1, 21], [2, 3], [2, 21]]),
        ("hours", [[1, 0.5], [2, 0.25], [1, 1.0]]),
    ],
)
def test_curves_can_be_drawn_over_what_runs_spent(
    inspector: Served, runs: Path, amount: str, spent: list[list[float]]
) -> None:
    """Iterations of 8 rows of 3 sampled tokens; a row of the first is undone, one of the second evicted."""
    with closing(new_store(runs / "a" / "replay.sqlite")) as store:
        for iteration, seconds in ((1, 1800.0), (2, 900.0)):
            store.add_metrics(RUN, iteration, {"time/iteration": seconds})
        store.add_metrics(RUN, 1, {"time/evaluation": 3600.0})
        ((undone,), (evicted,)) = sql(
            runs / "a" / "replay.sqlite", "select min(id) from trajectories group by iteration"
        )
        store.forget(schema.trajectories.c.id == evicted, dry_run=False)
        sql(runs / "a" / "replay.sqlite", "update trajectories set state = 'orphaned' where id = ?", undone)
    found = reading_of(inspector.page(address(show=[f"a:{RUN}"], over=amount, smooth=4)))
    assert (found["over"], found["smooth"], sorted(found["spent"]["a"])) == (amount, 4, sorted(spent))


def test_seeds_of_one_setting_and_marked_runs_look_like_one(inspector: Served, runs: Path) -> None:
    for number, name in enumerate(("a", ODD)):
        config = json.dumps({"run": {"seed": number}, "replay": {"fraction": 0.5}})
        sql(runs / name / "replay.sqlite", "update runs set config = ?", config)

    def roles(**asked: object) -> set[str]:
        curves = charts_of(inspector.page(address(**asked)))["reward"]["curves"]
        return {curve["role"] for curve in curves}

    assert roles() == {"s0"}
    assert roles(seeds="apart") == {"s0", "s1"}
    sql(runs / "a" / "replay.sqlite", "update runs set config = ?", json.dumps({"run": {"seed": 0}}))
    assert roles() == {"s0", "s1"}
    assert roles(one=[f"a:{RUN}", f"{ODD}:{RUN}"]) == {"s0"}
    assert set(reading_of(inspector.page(address(one=RUN)))["as_one"]) == {ODD, "a"}


def test_any_logged_metric_is_a_panel_of_its_own(inspector: Served) -> None:
    html = inspector.page(address(metric=["batch/replay", "nobody/logged"], smooth=4))
    found = charts(html)
    assert "No run here logged this name." in html and "the mean of up to 4 newest points" in html
    assert found["Metric batch/replay"]["a"] == [[1, 2.0], [2, 2.0]]
    assert found["Metric nobody/logged"] == {"a": [], ODD: []}
    assert '<option value="rollout/reward">' in html


def test_stop_reason_is_0_where_it_did_not_occur_in_a_run(inspector: Served, runs: Path) -> None:
    for name, shares in (("a", (0.25, None)), (ODD, (None, None))):
        with closing(new_store(runs / name / "replay.sqlite")) as store:
            for iteration, share in enumerate(shares, 1):
                others = {"rollout/stop/answered": 0.75}
                store.add_metrics(
                    RUN, iteration, others if share is None else others | {"rollout/stop/max_turns": share}
                )
    html = inspector.page(address(metric=["rollout/stop/max_turns", "rollout/stop/max_turn"]))
    found = charts(html)
    assert found["Metric rollout/stop/max_turns"] == {"a": [[1, 0.25], [2, 0.0]], ODD: [[1, 0.0], [2, 0.0]]}
    assert found["Metric rollout/stop/max_turn"] == {"a": [], ODD: []}


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
