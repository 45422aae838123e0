import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from context.messages import Message
from context.tokens.token_sequence import Segment
from replay import ReplayStore
from replay.pages.addresses import address
from replay.storage.format import schema
from tests.fakes.records import LLM, MESSAGES, RUN, a_run, iterated, put, sql, task, tokens, trajectory
from tests.replay.pages.serving import Served, inspecting
from tests.replay.storage.collecting.test_never_drawn import episode

ITERATIONS, TASK, HELD_OUT = f"/runs/{RUN}/iterations", "/tasks/task-1", f"/runs/{RUN}/held-out"


def said(*ids: int) -> Segment:
    return Segment(tokens(list(ids), [LLM] * len(ids)))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three iterations of 8 fresh rows in two groups, with 1 and 2 successes of 4, and five drawn. Only the first has
    quantiles of ratios; in the last, groups have equal rewards and one has advantages all the same.

    An import of iteration 7 begins alike in three rows: `b` parts from `a` at token 2, `c` has a second segment; the
    fourth of their group is damaged. There are evaluations before training, with one success of three, and after
    iteration 4.
    """
    path = tmp_path_factory.mktemp("rows") / "replay.sqlite"
    with closing(iterated(path, count=5)) as store:
        for name, value in {"p01": 0.5, "p50": 1.0, "p99": 1.25}.items():
            store.add_metrics(RUN, 1, {f"actor/replay/ratio_{name}": value, "actor/replay/token_gap_max": 9.0})
        store.add_run(a_run("import-1"))
        place = {"run": "import-1", "iteration": 7, "group": "theirs", "source": "import", "num_turns": 1}
        rows = [
            trajectory("a", segments=(said(1, 2, 3, 4),), **place),
            trajectory(
                "b", segments=(said(1, 2, 9, 4),), member=1, slot=1, reward=0.25, error_kinds="raised raised", **place
            ),
            trajectory("c", segments=(said(1, 2, 3, 4), said(5)), member=2, slot=2, **place),
            trajectory("damaged", member=3, slot=3, **place),
        ]
        rows[1] = replace(rows[1], messages=(*MESSAGES[:-1], Message("assistant", "on the table", author="llm")))
        store.append([task("task-2")], [], [])
        put(store, *rows, size=4)
        for iteration, successes in ((0, 1), (4, 3)):
            asked = [episode(number, iteration, success=number < successes) for number in range(3)]
            store.keep_held_out(RUN, [replace(each, stop_reason="max_turns") for each in asked], evaluations=9)
    sql(path, "update segments set tokens = ? where trajectory = 'damaged'", bytes(40))
    sql(path, "update groups set reward_std = 0.0 where iteration = 3")
    sql(path, "update draws set advantage = 0.0 where iteration = 3 and slot < 4")
    sql(path, "update draws set clip_fraction = slot / 100.0 where iteration = 3")
    return path


@pytest.fixture(scope="module")
def inspector(path: Path) -> Iterator[Served]:
    with inspecting(path) as server:
        yield server


def listed(html: str) -> list[str]:
    return re.findall(r'<tr data-href="/trajectories/([^"]+)">', html)


# The list


def test_rows_say_what_was_asked_and_how_far_they_drifted_and_how_stale_they_are(inspector: Served) -> None:
    html = inspector.page(address("buffer", run=RUN))
    assert len(listed(html)) == html.count(">Where is the key?</a>") == html.count(">in the drawer</span>") == 24
    # Every row was used at least once, fresh.
    assert html.count("<td>1.100</td>\n<td>1.50</td>") == 24
    # Eight rows each of policies 0, 1 and 2, where 3 is the newest.
    stale = "24 trajectories · those that can be drawn: staleness 2.0 on average, 3 at most</span>"
    assert stale in inspector.page(address("buffer", "overview", run=RUN))


def test_a_condition_that_no_row_fits_says_what_to_do(inspector: Served) -> None:
    named = inspector.page("/buffer?where=payload[%27hop%27]%3E2")
    assert "Take a condition away." in named and "Perhaps no task's payload has a field of this name" in unescape(named)
    other = inspector.page("/buffer?where=reward%3E2")
    assert "Take a condition away.</p>" in other and "a bar above" not in other


def test_rows_whose_tool_calls_failed_come_first_and_say_how(inspector: Served) -> None:
    html = inspector.page(address("buffer", run="import-1", sort="num_tool_errors"))
    assert (listed(html)[0], html.count('<span class="badge bad">2 raised</span>')) == ("b", 1)
    assert listed(inspector.page(address("buffer", run="import-1", where=["error_kind == 'raised'"]))) == ["b"]
    assert len(listed(inspector.page(address("buffer", run="import-1", where=["num_tool_errors < 2"])))) == 3


def test_filters_that_cannot_be_read_are_named_by_their_field_and_the_page_stays(inspector: Served) -> None:
    answer = inspector.page(address("buffer", run=RUN, sort="reward", where=["a > 1", "iteration == 2", "rewrd > 0.5"]))
    html = unescape(answer)
    assert len(listed(html)) == 8
    field = unescape(re.findall(r'<input id="where"[^>]*>', answer)[0])
    assert 'value="rewrd > 0.5"' in field and 'aria-describedby="wrong-where"' in field
    (wrong,) = re.findall(r'<div class="wrong" id="wrong-where" role="alert">(.*?)</div>', html)
    assert "where must name a field here, got 'rewrd'. Did you mean reward?" in wrong and "got 'a'" in wrong
    # What was understood is kept, and what comes next builds on it.
    kept = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', html)
    assert kept == [("run", RUN), ("sort", "reward"), ("where", "iteration == 2")]
    assert "rewrd" not in html.replace(field, "").replace(wrong, "")


# One iteration


def slots(html: str) -> list[int]:
    row = r'<tr data-href="/trajectories/[^"]+"><td class="text"><span[^>]*>\w+</span></td><td>(\d+)</td>'
    return [int(slot) for slot in re.findall(row, html)]


def between(html: str, first: str, last: str) -> str:
    start = html.index(first)
    return html[start : html.index(last, start)]


def test_iteration_lists_its_rows_and_leads_to_its_neighbours(inspector: Served) -> None:
    html = inspector.page(f"{ITERATIONS}/2")
    # Eight were fresh; the five that were drawn come first.
    assert slots(html) == [*range(8, 13), *range(8)]
    assert f'href="{ITERATIONS}/1"' in html and f'href="{ITERATIONS}/3"' in html
    assert "agentloop replay lineage 2" in html
    assert html.count('title="Where is the key?">') == html.count('<span title="in the drawer">') == 13
    for number, key in ((1, "n"), (3, "p")):  # the first and the last lead one way only
        html = inspector.page(f"{ITERATIONS}/{number}")
        assert re.findall(r'class="button" data-key="([np])"', html) == [key]
        assert html.count('aria-disabled="true"') == 1


def test_iteration_shows_quantiles_of_ratios_and_groups_that_taught_nothing(inspector: Served) -> None:
    first, second = (inspector.page(f"{ITERATIONS}/{number}") for number in (1, 2))
    unknown = "\u2013"
    measured = ["0.500", "1.000", "1.250", unknown, unknown, *[unknown] * 4, "9.000"]  # a ratio's, and the largest gap
    assert re.findall(r"<td>([^<]*)</td>", between(first, "<th>1 %</th>", "</table>")) == measured
    assert re.findall(r"<td>([^<]*)</td>", between(second, "<th>1 %</th>", "</table>")) == [
        *[unknown] * 4,
        "1.500",
    ]  # its draws'
    assert "1 fresh group without an advantage" in inspector.page(f"{ITERATIONS}/3")


def test_row_that_went_is_named_with_the_reason(tmp_path: Path) -> None:
    with closing(iterated(tmp_path / "replay.sqlite", 1)) as store:
        store.prune(RUN, rows=schema.trajectories.c.slot == 2, dry_run=False)
        with inspecting(store) as server:
            html = server.page(f"{ITERATIONS}/1")
    assert html.count('evicted <span class="soft">pruned by where</span>') == 1
    assert slots(html) == list(range(8))


def test_rows_of_an_iteration_are_sorted_and_paged_by_address(inspector: Served) -> None:
    here = f"{ITERATIONS}/3"
    clipped = inspector.page(f"{here}?sort=clip_fraction")
    assert slots(clipped) == list(range(12, -1, -1))
    assert slots(inspector.page(f"{here}?sort=slot&from=10")) == [10, 11, 12]
    assert re.search(r'<th aria-sort="descending"><a href="[^"]*sort=clip_fraction#rows">', clipped)
    assert "1 to 13 of 13</span>" in clipped


# One task


def titles(html: str) -> list[str]:
    return re.findall(r"<title>([^<]+)</title>", html)[1:]


def test_task_shows_success_by_policy_of_each_run(inspector: Served) -> None:
    html = inspector.page(f"{TASK}?run={RUN}")
    shown = [title for title in titles(html) if title.startswith("policy")]
    assert shown == [f"policy {version}: 3 of 8 attempts successful" for version in range(3)]
    assert f'href="{TASK}?run=%2A"' in html
    both = inspector.page(TASK)
    assert "in 2 runs" in both and len([title for title in titles(both) if title.startswith("policy")]) == 4
    assert "Never tried here" in inspector.page("/tasks/task-2")


# Held-out episodes


def test_newest_evaluation_is_listed_and_others_and_failures_lead_to_theirs(inspector: Served) -> None:
    def numbers(query: str) -> list[int]:
        row = r'<tr data-href="/runs/[^"]+/held-out/[^"]+"><td>(\d+)</td>'
        return [int(found) for found in re.findall(row, inspector.page(HELD_OUT + query))]

    html = inspector.page(HELD_OUT)
    assert "<strong>4</strong>" in html and f'<a href="{HELD_OUT}?iteration=0&amp;only=all">0</a>' in html
    assert "What is 6 times 7?" in html and "max_turns" in html
    asked = ("", "?iteration=0&only=failed", "?iteration=4&only=failed", "?iteration=0&limit=1")
    assert [numbers(query) for query in asked] == [[0, 1, 2], [1, 2], [], [0]]
    one = inspector.page(f"{HELD_OUT}/task-1")
    evaluations = ["After iteration 0: no success, reward 0.00", "After iteration 4: success, reward 1.00"]
    assert [found.strip() for found in re.findall(r"<summary>(After[^<]+)", one)] == evaluations
    assert one.count('<p class="label">calls multiply</p>') == one.count("{&#34;a&#34;: 6, &#34;b&#34;: 7}") == 2
    assert one.count("What is 6 times 7?") == 1 and "How it was lost" not in one


def test_lost_held_out_task_shows_its_payload_and_its_last_success_beside_the_failure(file_store: ReplayStore) -> None:
    put(file_store, trajectory("row", task="task-0"))
    for iteration, success in ((0, True), (2, True), (4, False)):
        file_store.keep_held_out(RUN, [episode(0, iteration, success=success)], evaluations=9)
    with inspecting(file_store) as server:
        html = server.page(f"{HELD_OUT}/task-0")
        file_store.keep_held_out(RUN, [episode(0, 6, success=True)], evaluations=9)
        again = server.page(f"{HELD_OUT}/task-0")
    beside = ["After iteration 2: success, reward 1.00", "After iteration 4: no success, reward 0.00"]
    assert [re.findall(r"<h3>([^<]+)</h3>", page) for page in (html, again)] == [beside, beside]
    assert "<h2>How it was lost</h2>" in html and "<h2>How it was lost for a while</h2>" in again
    assert "{&#34;hops&#34;:2,&#34;store&#34;:{&#34;k1&#34;:&#34;drawer&#34;}}" in html and "<details" in html
    assert html.count("What is 6 times 7?") == 1 and not re.findall(r"<details[^>]* open", html)


# Links and refusals


@pytest.mark.parametrize(
    ("target", "iterations"),
    [
        ("/trajectories/MINE", {1}),
        ("/trajectories/a", set()),  # an iteration that was not committed here is no link
        (f"{TASK}?run=*", {1, 2, 3}),
        (f"/runs/{RUN}", {1, 2, 3}),
        ("/runs/import-1", set()),
    ],
)
def test_every_link_leads_somewhere(inspector: Served, path: Path, target: str, iterations: set[int]) -> None:
    ((mine,),) = sql(path, "select id from trajectories where iteration = 1 and slot = 0")
    html = inspector.page(target.replace("MINE", str(mine)))
    links = {unescape(each) for each in re.findall(r'(?:href|hx-get)="(/[^"#]*)', html)}
    assert {link for link in links if "/iterations/" in link} == {f"{ITERATIONS}/{number}" for number in iterations}
    for link in sorted(links):
        assert inspector.ask(link).status in (200, 303), link


@pytest.mark.parametrize(
    ("target", "status", "problem"),
    [
        (f"{HELD_OUT}?iteration=3", 404, "iteration must be one whose evaluation"),
        (f"{ITERATIONS}/4", 404, "iteration must be a committed one, from 1 to 3, got 4"),
        (f"{ITERATIONS}/one", 400, "number must be a whole number"),
        (f"{ITERATIONS}/1?sort=size", 400, "sort must be one of stream, slot, "),
        ("/runs/nobody/iterations/1", 404, "run must name one run"),
        ("/tasks/nothing", 404, "HASH must be the beginning of one task"),
        ("/trajectories/a?segment=2", 404, "segment must be from 0 to 0, got 2"),
    ],
)
def test_what_is_not_there_is_one_line(inspector: Served, target: str, status: int, problem: str) -> None:
    found, text = inspector.problem(target)
    assert (found, problem in text) == (status, True), text[-600:]


def test_search_goes_on_from_the_part_before_until_the_page_is_full(tmp_path: Path) -> None:
    with closing(iterated(tmp_path / "replay.sqlite")):
        pass
    with inspecting(tmp_path / "replay.sqlite") as served:
        asked = {"where": "'key' in text", "limit": 20}
        page = served.page(address("buffer", **asked))
        assert "20 found on this page, 24 conversations searched" in page and "data-search-on" not in page
        # A part that follows 18 found rows of 400 searched ones gives two more.
        part = served.page(address("buffer", **asked, found=18, searched=400))
        assert part.count("<tr data-href") == 2 and "20 found on this page, 424 conversations searched" in part
