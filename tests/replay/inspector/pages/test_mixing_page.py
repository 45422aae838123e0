"""The mixing page over HTTP: its address is its state, its answer is `queries.preview`, and it never breaks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from html import unescape
from pathlib import Path
from urllib.parse import urlencode

import pytest
from replay.inspector.app import create_app
from replay.inspector.pages import mixing_page
from replay.inspector.server.guard import Guard
from tests.replay.inspector.serving import Served, served
from typer.testing import CliRunner

from agentloop.cli.main import app
from replay import ReplayStore
from replay.queries.open_buffer import OpenBuffer, open_buffer
from replay.sampling.samplers import make_sampler
from tests.fakes.records import RUN, iterate, new_store, run_record, sql
from tests.fakes.replay_command import preview_of

CHOSEN = {"fraction": "0.0625", "sampler": "uniform", "successful_only": "false", "max_staleness": "2"}


@pytest.fixture(scope="module")
def three_iterations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayStore]:
    """24 fresh rows of three iterations, two drawn in each."""
    path = tmp_path_factory.mktemp("run") / "replay.sqlite"
    writer, sampler = new_store(path), make_sampler("uniform", 3)
    for iteration in (1, 2, 3):
        iterate(writer, iteration, sampler)
    writer.close()
    with closing(ReplayStore.open(path, read_only=True)) as reader:
        yield reader


@pytest.fixture(scope="module")
def server(three_iterations: ReplayStore) -> Iterator[Served]:
    with served(create_app(OpenBuffer(three_iterations, named="runs/quickstart-001"), Guard())) as found:
        yield found


def page(server: Served, **parameters: str) -> str:
    answer = server.ask(f"/mixing?{urlencode(parameters)}")
    assert answer.status == 200, answer.text
    return answer.text


def test_twin_is_the_answer_to_the_same_address(server: Served, three_iterations: ReplayStore) -> None:
    answer = json.loads(server.ask(f"/mixing.json?{urlencode(CHOSEN)}").text)
    assert (answer.pop("errors"), answer.pop("own")["fraction"]) == ({}, 0.0)
    assert answer == preview_of(three_iterations, RUN, CHOSEN)


def test_page_shows_the_batch_with_links_to_its_rows(server: Served, three_iterations: ReplayStore) -> None:
    text = page(server, **CHOSEN)
    answer = preview_of(three_iterations, RUN, CHOSEN)
    # A sixteenth of 128 rows; the rest is fresh, in groups of 8.
    assert len(answer["batch"]["rows"]) == 8
    for row in answer["batch"]["rows"]:
        assert f'href="/trajectories/{row["id"]}"' in text
    assert text.count('<span class="slot fresh"></span>') == 120 + 1  # and one in the legend
    assert unescape(text).count(answer["yaml"]) == 1
    assert "older than 2 policy versions" in text
    rows = re.findall(r"<tr><td>(\d+)</td><td>6.2\u00a0%</td><td>8</td><td>8</td><td>120</td>", text)
    assert rows == [str(iteration) for iteration in range(4, 24)]  # 20 iterations to come


def test_page_names_a_source_that_can_give_nothing(server: Served) -> None:
    sentence = "source 'self' can give nothing: replay.max_staleness leaves out the last of its 24 rows."
    assert f'<p class="warning">{sentence}</p>' in unescape(page(server, **CHOSEN | {"max_staleness": "0"}))
    assert "can give nothing" not in page(server, **CHOSEN)


def test_controls_show_what_the_address_says(server: Served) -> None:
    text = page(server, **CHOSEN, **{"recency.half_life": "3"})
    assert (
        '<input id="max_staleness" name="max_staleness" type="text" inputmode="numeric" placeholder="any" value="2">'
        in text
    )
    assert '<option value="uniform" selected>' in text
    assert '<option value="false" selected>' in text
    assert 'name="recency.half_life" value="3"' in text


def test_command_of_the_page_asks_the_same(server: Served) -> None:
    text = unescape(page(server, **CHOSEN, max_uses="", unit="any"))
    keys = ("fraction=0.0625", "sampler=uniform", "successful_only=false", "max_staleness=2")
    asked = " ".join(f"--set replay.{key}" for key in keys)
    assert f"agentloop replay mix runs/quickstart-001 {asked}</code>" in text
    text = unescape(page(server, sampler="recency", **{"recency.half_life": "3"}))
    assert """--set replay.sampler=recency --set 'replay.sampler_options={"half_life": 3}'</code>""" in text


def test_rows_tell_how_often_they_were_replayed(three_iterations: ReplayStore) -> None:
    rows = preview_of(three_iterations, RUN, CHOSEN)["batch"]["rows"]
    counted = "select count(*) from draws where trajectory = ? and stream = 'replay' and state = 'committed'"
    assert [row["replayed"] for row in rows] == [sql(three_iterations, counted, row["id"])[0][0] for row in rows]
    assert any(row["replayed"] for row in rows)


@pytest.fixture
def two_runs(tmp_path: Path) -> Path:
    """A file with the rows of one run, and another that has none."""
    path = tmp_path / "replay.sqlite"
    with closing(new_store(path)) as writer:
        iterate(writer, 1, make_sampler("uniform", 3))
        writer.add_run(run_record("run-2"))
    return path


@pytest.mark.parametrize("run", [RUN, "run-2"])
def test_commands_name_the_run_where_there_are_several(two_runs: Path, run: str) -> None:
    with open_buffer(str(two_runs)) as source, served(create_app(source, Guard())) as found:
        text = unescape(page(found, run=run, fraction="0.5"))
        listed = unescape(found.ask(f"/buffer?run={run}").text)
        everything = unescape(found.ask("/buffer?run=*").text)
    command = f"agentloop replay mix {two_runs} --run {run} --set replay.fraction=0.5"
    assert command in text
    answer = CliRunner().invoke(app, [*command.split()[1:], "--json"])
    with closing(ReplayStore.open(two_runs, read_only=True)) as reader:
        assert json.loads(answer.stdout) == preview_of(reader, run, {"fraction": "0.5"})
    assert f"agentloop replay ls {two_runs} --sort iteration --where \"run == '{run}'\"" in listed
    assert f"agentloop replay ls {two_runs} --sort iteration</code>" in everything


@pytest.mark.parametrize(
    ("parameters", "control"),
    [
        ({"fraction": "2"}, "fraction"),
        ({"fraction": "\x00\u202e<script>"}, "fraction"),
        ({"unit": "rows"}, "unit"),
        ({"unit": "trajectory"}, "unit"),
        ({"max_staleness": "1.5"}, "max_staleness"),
        ({"max_uses": "-3"}, "max_uses"),
        ({"successful_only": "perhaps"}, "successful_only"),
        ({"mode": "dream"}, "mode"),
        ({"sampler": "recency", "recency.half_life": "[" * 5000}, "sampler_options"),
        ({"sampler": "recency", "recency.half_life": "1e999"}, "sampler_options"),
        ({"sampler": "recency", "recency.half_life": "NaN"}, "sampler_options"),
        ({"sampler": "recency", "recency.half_life": "9" * 400}, "sampler_options"),
        ({"sampler": "recency", "recency.half_life": "1e308"}, "sampler_options"),
        ({"sampler": "recency", "recency.other": '{"deep": [-Infinity]}'}, "sampler_options"),
        ({"sampler": "entropy", "entropy.pool": "9" * 30}, "sampler_options"),
        ({"sampler": "freshness", "freshness.sampler": "freshness"}, "sampler_options"),
        ({"sampler": "mine.py:Mine"}, "sampler"),
    ],
)
def test_a_wrong_setting_is_told_beside_its_control(server: Served, parameters: dict[str, str], control: str) -> None:
    text = page(server, **parameters)
    assert f'<p class="wrong" id="wrong-{control}" role="alert">replay.{control}' in text or control == "unit"
    assert text.count('role="alert">') == 1
    assert "<h2>No batch</h2>" in text and "<script>" not in text


@pytest.mark.parametrize(
    "given",
    [
        {"sampler": "difficulty", "difficulty.sigma": "1e308"},
        {"sampler": "difficulty", "difficulty.sigma": "1e-308"},
        {"sampler": "entropy", "entropy.pool": "9" * 18},
        {"sampler": "recency", "recency.half_life": "1e-310"},
        {"sampler": "freshness", "freshness.tau": "1e-310"},
    ],
)
def test_options_at_their_ends_are_tried_out(server: Served, given: dict[str, str]) -> None:
    answer = server.ask(f"/mixing.json?{urlencode({'fraction': '0.0625', **given})}")
    assert answer.status == 200, answer.text
    assert json.loads(answer.text)["errors"] == {}


def test_a_password_of_the_database_is_in_no_command(three_iterations: ReplayStore) -> None:
    source = OpenBuffer(three_iterations, named="postgresql://me:pass-word@host/db")
    with served(create_app(source, Guard())) as found:
        text = unescape(page(found, fraction="0.5"))
    assert "pass-word" not in text
    assert f"agentloop replay mix {three_iterations.url} --set replay.fraction=0.5" in text


def test_a_database_of_several_runs_asks_which(
    three_iterations: ReplayStore, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("two") / "replay.sqlite"
    writer = new_store(path)
    writer.add_run(run_record("run-2"))
    with served(create_app(OpenBuffer(writer), Guard())) as found:
        assert 'href="/mixing?run=run-2"' in page(found)
        assert found.ask("/mixing?run=other").status == 404
        # Before its first iteration, with an empty buffer.
        assert "can't give 64 of the 64 rows" in unescape(page(found, run="run-2", fraction="0.5"))
    writer.close()


def test_page_writes_nothing(server: Served, three_iterations: ReplayStore) -> None:
    tables = ("draws", "sampler_state", "iterations", "metrics")
    before = [sql(three_iterations, f"select * from {table} order by 1, 2, 3") for table in tables]
    page(server, **CHOSEN)
    assert [sql(three_iterations, f"select * from {table} order by 1, 2, 3") for table in tables] == before


def test_a_large_buffer_is_announced_before_it_is_read(
    three_iterations: ReplayStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert three_iterations.path is not None
    monkeypatch.setattr(mixing_page, "_MANY", 20)
    with (
        closing(ReplayStore.open(three_iterations.path, read_only=True)) as cold,
        served(create_app(OpenBuffer(cold), Guard())) as found,
    ):
        first = page(found, **CHOSEN, max_uses="")
        assert "24 rows go into memory" in first and not cold.has_read(RUN)
        again = unescape(re.search(r'content="0; url=([^"]+)"', first)[1])  # type: ignore[index]  # it is there
        assert again == f"/mixing?{urlencode({**CHOSEN, 'max_uses': '', 'read': '1'})}"
        assert '<h2 class="plain">The batch</h2>' in found.ask(again).text
        # What went wrong makes it be read again, which a form that fetches its answer waits for.
        assert page(found, **CHOSEN).count('<input type="hidden" name="read" value="1">') == 1
        # From then on the page comes at once.
        assert "The batch" in page(found, **CHOSEN)
