import json
import re
from collections.abc import Iterator
from contextlib import closing
from html import unescape
from pathlib import Path
from urllib.parse import urlencode

import pytest

from replay import ReplayStore
from replay.next_batch import preview_with
from replay.open_buffer import open_buffer
from replay.pages.app import create_app
from tests.fakes.records import RUN, a_run, iterated, sql
from tests.replay.pages.serving import Served, charts_of, inspecting, served

CHOSEN = "fraction=0.0625 sampler=uniform successful_only=false max_staleness=2"


@pytest.fixture(scope="module")
def server(three_iterations: ReplayStore) -> Iterator[Served]:
    with inspecting(three_iterations, named="runs/quickstart-001") as found:
        yield found


def page(server: Served, **parameters: str) -> str:
    return server.page(f"/mixing?{urlencode(parameters)}")


def test_page_shows_the_batch_with_its_rows_and_writes_nothing(server: Served, three_iterations: ReplayStore) -> None:
    tables = ("draws", "sampler_state", "iterations", "metrics")
    before = [sql(three_iterations, f"select * from {table} order by 1, 2, 3") for table in tables]
    text = page(server, set=CHOSEN)
    chosen = {"fraction": 0.0625, "sampler": "uniform", "successful_only": False, "max_staleness": 2}
    answer = preview_with(three_iterations, RUN, **chosen)
    # A sixteenth of 128 rows.
    assert len(answer["batch"]["rows"]) == 8
    assert re.findall(r'class="value (fresh|replay)">(\d+)<', text) == [("fresh", "120"), ("replay", "8")]
    for row in answer["batch"]["rows"]:
        assert f'href="/trajectories/{row["id"]}"' in text
    assert unescape(text).count(answer["yaml"]) == 1
    assert "older than 2 policy versions" in text and "can give nothing" not in text
    sentence = "source 'self' can give nothing: replay.max_staleness leaves out the last of its 24 rows."
    assert f'<p class="warning">{sentence}</p>' in unescape(page(server, set=CHOSEN.replace("ness=2", "ness=0")))
    assert [sql(three_iterations, f"select * from {table} order by 1, 2, 3") for table in tables] == before


def test_every_source_the_schedule_and_every_rule_are_shown(tmp_path: Path) -> None:
    replay = {
        "fraction": 0.5,
        "schedule": {"shape": "linear", "final": 0.0},
        "sources": {"self": 0.75, "wins": 0.25},
        "attach": {"wins": "runs/wins"},
        "successful_only": False,
        "sampler": "uniform",
        "shortfall": "shrink",
        "per_task": 3,
    }
    path = tmp_path / "replay.sqlite"
    iterated(path).close()
    config = {"run": {"iterations": 5}, "batch": {"trajectories": 16, "group_size": 4}, "replay": replay}
    sql(path, "update runs set config = ?", json.dumps(config))
    with inspecting(path) as server:
        text, html = server.words("/mixing"), server.page("/mixing")
    # A draw can take 3 rows of one task, and all stored ones are of one; of 2 rows the larger share takes both.
    assert "self 75.0 % 3 2 wins runs/wins 25.0 % 0 0" in text
    # From 0.5 to 0 in five iterations; the next is the fourth.
    (schedule,) = charts_of(html).values()
    assert schedule["curves"][0]["points"] == [[1, 0.5], [2, 0.375], [3, 0.25], [4, 0.125], [5, 0.0]]
    assert schedule["axis"]["unit"] == "share of trajectories" and "[[4, &#34;next&#34;]]" in html
    for rule in ("per_task: 3", "shape: linear", "final: 0.0"):
        assert rule in text, rule


def test_a_run_that_has_ended_says_what_a_resume_would_do(tmp_path: Path) -> None:
    path = tmp_path / "replay.sqlite"
    iterated(path).close()
    replay = {"fraction": 0.5, "schedule": {"shape": "linear", "final": 0.0}, "successful_only": False}
    sql(path, "update runs set config = ?", json.dumps({"run": {"iterations": 3}, "replay": replay}))
    constant = '{"shape":"constant","final":null}'
    with inspecting(path) as server:
        text, html = server.words("/mixing"), server.page("/mixing")
        tried = server.words("/mixing?" + urlencode({"set": f"fraction=0.0625 schedule={constant}"}))
    sentence = "The run has ended after iteration 3. A resume with more iterations, or without its target, would"
    assert sentence in text and "and gives 0.0 % here." in text
    (schedule,) = charts_of(html).values()
    assert schedule["curves"][0]["points"] == [[1, 0.5], [2, 0.25], [3, 0.0], [4, 0.0]]
    assert sentence in tried and "fresh 120" in tried and "here." not in tried


def test_a_run_of_another_agentloop_has_a_page_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "replay.sqlite"
    iterated(path, 1).close()
    sql(path, "update runs set config = ?", json.dumps({"replay": {"negative_weight": 1.0}}))
    with inspecting(path) as server:
        text = server.words("/mixing")
    assert (
        "No batch configuration of run run-1 must be one of this agentloop, got one that another recorded: "
        "replay.negative_weight must be a known key, got an unknown one. Use the agentloop that recorded it."
    ) in text


def test_field_and_command_say_what_the_address_says(server: Served, three_iterations: ReplayStore) -> None:
    text = unescape(page(server, set=CHOSEN))
    assert f'value="{CHOSEN}"' in text
    words = " ".join(f"--set replay.{word}" for word in CHOSEN.split())
    assert f"agentloop replay mix runs/quickstart-001 {words}</code>" in text
    text = unescape(page(server, set='sampler=recency sampler_options={"half_life":3}'))
    assert """--set replay.sampler=recency --set 'replay.sampler_options={"half_life":3}'</code>""" in text
    with inspecting(three_iterations, named="postgresql://me:pass-word@host/db") as found:
        text = unescape(page(found, set="fraction=0.5"))
    assert "pass-word" not in text
    assert f"agentloop replay mix {three_iterations.url} --set replay.fraction=0.5" in text


def test_a_database_of_several_runs_asks_which(tmp_path: Path) -> None:
    path = tmp_path / "replay.sqlite"
    with closing(iterated(path, 1)) as writer:
        writer.add_run(a_run("run-2"))
    with open_buffer(str(path)) as source, served(create_app(source)) as found:
        assert 'href="/mixing?run=run-2"' in page(found)
        assert found.ask("/mixing?run=other").status == 404
        # Before its first iteration, with an empty buffer.
        assert "can't give 64 of the 64 rows" in unescape(page(found, run="run-2", set="fraction=0.5"))
        text = unescape(page(found, run=RUN, set="fraction=0.5"))
    assert f"agentloop replay mix {path} --run {RUN} --set replay.fraction=0.5" in text


@pytest.mark.parametrize(
    "given",
    [
        "fraction=\x00\u202e<script>",
        "sampler=recency sampler_options=" + "[" * 5000,
        'sampler=recency sampler_options={"other":[-Infinity]}',
        "<script>",
    ],
)
def test_a_wrong_setting_is_named_and_shows_no_batch(server: Served, given: str) -> None:
    text = page(server, set=given)
    assert text.count('role="alert"><h2>No batch</h2><p class="message">replay') == 1
    assert "<script>" not in text


@pytest.mark.parametrize(
    ("sampler", "options"),
    [
        ("difficulty", {"sigma": 1e308}),
        ("difficulty", {"sigma": 1e-308}),
        ("entropy", {"pool": 10**18 - 1}),
        ("recency", {"half_life": 1e-310}),
        ("freshness", {"tau": 1e-310}),
    ],
)
def test_options_at_their_ends_are_tried_out(server: Served, sampler: str, options: dict[str, float]) -> None:
    written = json.dumps(options, separators=(",", ":"))
    assert 'role="alert"' not in page(server, set=f"fraction=0.0625 sampler={sampler} sampler_options={written}")
