import re
from collections.abc import Iterator
from contextlib import closing

import pytest

from replay import ReplayStore
from replay.pages.addresses import address
from tests.fakes.records import RUN, a_run, iterated, put, trajectory
from tests.replay.pages.serving import Served, charts_of, inspecting, words_of


@pytest.fixture(scope="module")
def inspector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Three iterations of a task with 3 of 8 successes in each; and two tries of another, without and with success."""
    path = tmp_path_factory.mktemp("learning") / "replay.sqlite"
    with closing(iterated(path, count=5)) as store:
        for iteration, solved in ((1, False), (2, True)):
            id, errors = f"other-{iteration}", None if solved else "raised"
            place = {"group": id, "task": "other", "iteration": iteration, "slot": 20}
            row = trajectory(id, **place, success=solved, error_kinds=errors)
            put(store, row, size=1, success_rate=float(solved))
    with inspecting(path) as server:
        yield server


def test_tasks_are_sorted_by_their_trend_in_either_direction(inspector: Served) -> None:
    pages = [inspector.page(f"/tasks?run={RUN}&sort=trend{order}") for order in ("", "&order=asc")]
    orders = [[*dict.fromkeys(re.findall(r'href="/tasks/([^"?]+)\?', page))] for page in pages]
    assert orders == [["other", "task-1"], ["task-1", "other"]]
    falling = words_of(pages[0])
    assert "2 tried, 0 never solved" in falling
    # Half of two attempts; 0 %, 100 %, the best, the difference; both groups have one member: no signal.
    assert "50.0 % other Where is the key? hops 2 2 2 0.0 % 100.0 % 100.0 % +100 2 of 2 0 – –" in falling
    assert 'aria-label="0 % at iteration 1, 100 % at 2"' in inspector.page(f"/tasks?run={RUN}")


def test_pages_say_why_nothing_can_be_compared_if_each_task_was_met_once(file_store: ReplayStore) -> None:
    for slot in range(2):
        put(file_store, trajectory(f"row-{slot}", group=f"g{slot}", slot=slot, task=f"task-{slot}"))
    file_store.add_run(a_run("run-2"))
    put(file_store, trajectory("other", group="other", task="other", run="run-2"))
    with inspecting(file_store) as server:
        assert "No task in this list was tried in a second iteration" in server.words(f"/tasks?run={RUN}")
        assert "no task of this run was tried in two iterations" in server.words(f"/runs/{RUN}/after-replay")
        compared = server.words(f"/compared-tasks?show={RUN}&show=run-2")
    assert "No task was tried by two of these runs" in compared and "of 0 tasks" not in compared


def test_failures_stand_beside_successes_and_lead_to_their_rows(inspector: Served) -> None:
    html, text = inspector.page(f"/outcomes?run={RUN}"), inspector.words(f"/outcomes?run={RUN}")
    assert "16 failed, 10 successful" in text and "raised 6.2 % 0.0 %" in text
    assert "error_kind%20%3D%3D%20%27raised%27" in html
    of_one = inspector.words(f"/outcomes?run={RUN}&where=task+%3D%3D+%27other%27")
    assert "1 failed, 1 successful" in of_one


def test_replayed_shows_its_share_what_followed_and_the_largest_gaps(inspector: Served) -> None:
    target = f"/runs/{RUN}/replayed"
    (panel,) = charts_of(inspector.page(target)).values()
    # 5 of the 13 rows of iterations 2 and 3; the fakes give all rows one advantage and the sampler one weight.
    points = {curve["label"]: curve["points"] for curve in panel["curves"]}
    assert points["of the rows"] == [[1, 0.0], [2, pytest.approx(5 / 13)], [3, pytest.approx(5 / 13)]]
    followed = address("runs", RUN, "after-replay")
    assert f'hx-get="{followed}"' in inspector.page(target)
    text = inspector.words(followed)
    assert "some of the group yes 1 0.0 % 0.0 % to 79.3 % +0.000" in text
    assert "none of the group no 1 100.0 % 20.7 % to 100.0 % +1.000" in text
    gaps = inspector.words(target)
    assert "1.500" in gaps and "No row is scored yet." in gaps


def test_tools_page_counts_calls_in_messages_and_leads_to_their_rows(inspector: Served) -> None:
    html, text = inspector.page(f"/runs/{RUN}/tools"), inspector.words(f"/runs/{RUN}/tools")
    assert "all 26 episodes" in text
    # Each of the fakes' episodes looks up once; no call was timed, and 10 of 26 episodes succeed.
    assert "lookup 26 none 0.0 % 26 100.0 % 38.5 % – not known not known" in text
    assert "tool%20%3D%3D%20%27lookup%27" in html
    assert list(charts_of(html)) == ["calls", "episodes-that-use-a-tool"]


def test_cost_page_takes_prices_and_says_what_is_not_known(inspector: Served) -> None:
    text = inspector.words(f"/runs/{RUN}/cost?price_million=1000000")
    # Three sampled tokens of 26 episodes, 10 of them successes; 34 rows in updates, 10 of them replayed.
    assert "generated tokens 78 3 7.8 trained tokens 102 3.92 10.2 seconds not known" in text
    assert "money, at the prices above 78 3 7.8" in text
    assert "stored rows 26 26 1 26" in text
    status, problem = inspector.problem(f"/runs/{RUN}/cost?price_hour=nan")
    assert status == 400 and "price_hour must be a number from 0, got 'nan'." in problem
