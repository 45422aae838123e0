import json
import re
from collections.abc import Iterator
from contextlib import closing
from html import unescape
from pathlib import Path
from urllib.parse import urlencode

import pytest

from replay import ReplayStore
from replay.pages.app import create_app
from replay.questions.open_buffer import open_buffer
from replay.questions.preview import preview_with
from tests.fakes.records import RUN, a_run, iterated, sql
from tests.replay.pages.serving import Served, inspecting, served

CHOSEN = {"fraction": "0.0625", "sampler": "uniform", "successful_only": "false", "max_staleness": "2"}


@pytest.fixture(scope="module")
def server(three_iterations: ReplayStore) -> Iterator[Served]:
    with inspecting(three_iterations, named="runs/quickstart-001") as found:
        yield found


def page(server: Served, **parameters: str) -> str:
    return server.page(f"/mixing?{urlencode(parameters)}")


def test_page_shows_the_batch_with_its_rows_and_writes_nothing(server: Served, three_iterations: ReplayStore) -> None:
    tables = ("draws", "sampler_state", "iterations", "metrics")
    before = [sql(three_iterations, f"select * from {table} order by 1, 2, 3") for table in tables]
    text = page(server, **CHOSEN)
    answer = preview_with(three_iterations, RUN, **CHOSEN)
    # A sixteenth of 128 rows.
    assert len(answer["batch"]["rows"]) == 8
    for row in answer["batch"]["rows"]:
        assert f'href="/trajectories/{row["id"]}"' in text
    assert unescape(text).count(answer["yaml"]) == 1
    assert "older than 2 policy versions" in text and "can give nothing" not in text
    sentence = "source 'self' can give nothing: replay.max_staleness leaves out the last of its 24 rows."
    assert f'<p class="warning">{sentence}</p>' in unescape(page(server, **CHOSEN | {"max_staleness": "0"}))
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
    found = re.findall(r"<title>([0-9]+: [0-9.]+)</title>", html)
    assert found == ["1: 50.0", "2: 37.5", "3: 25.0", "4: 12.5", "5: 0.0"]
    for rule in ("shortfall: shrink", "per_task: 3", "cooldown: 0", "shape: linear"):
        assert rule in text, rule


def test_controls_and_command_say_what_the_address_says(server: Served, three_iterations: ReplayStore) -> None:
    text = unescape(page(server, **CHOSEN, **{"recency.half_life": "3"}, max_uses="", unit="any"))
    asked = " ".join(f"--set replay.{key}={value}" for key, value in CHOSEN.items())
    for part in (
        '<input id="max_staleness" name="max_staleness" type="text" inputmode="numeric" placeholder="any" value="2">',
        *('<option value="uniform" selected>', '<option value="false" selected>'),
        *('name="recency.half_life" value="3"', f"agentloop replay mix runs/quickstart-001 {asked}</code>"),
    ):
        assert part in text, part
    text = unescape(page(server, sampler="recency", **{"recency.half_life": "3"}))
    assert """--set replay.sampler=recency --set 'replay.sampler_options={"half_life": 3}'</code>""" in text
    with inspecting(three_iterations, named="postgresql://me:pass-word@host/db") as found:
        text = unescape(page(found, fraction="0.5"))
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
        assert "can't give 64 of the 64 rows" in unescape(page(found, run="run-2", fraction="0.5"))
        text = unescape(page(found, run=RUN, fraction="0.5"))
    assert f"agentloop replay mix {path} --run {RUN} --set replay.fraction=0.5" in text


def test_a_wrong_setting_is_named_by_its_control(server: Served) -> None:
    for parameters, control in (
        ({"fraction": "\x00\u202e<script>"}, "fraction"),
        ({"sampler": "recency", "recency.half_life": "[" * 5000}, "sampler_options"),
        ({"sampler": "recency", "recency.other": '{"deep": [-Infinity]}'}, "sampler_options"),
    ):
        text = page(server, **parameters)
        assert text.count('role="alert">') == 1
        assert f'<p class="wrong" id="wrong-{control}" role="alert">replay.{control}' in text
        assert "<h2>No batch</h2>" in text and "<script>" not in text


def test_options_at_their_ends_are_tried_out(server: Served) -> None:
    huge, tiny = {"difficulty.sigma": "1e308", "entropy.pool": "9" * 18}, {"recency.half_life": "1e-310"}
    for option, value in [*huge.items(), *tiny.items(), ("difficulty.sigma", "1e-308"), ("freshness.tau", "1e-310")]:
        asked = {"fraction": "0.0625", "sampler": option.partition(".")[0], option: value}
        assert 'role="alert"' not in page(server, **asked), option
