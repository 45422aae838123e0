"""Pages of what evaluations were asked and answered."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from tests.fakes.records import RUN, new_store
from tests.replay.pages.serving import Served, inspecting
from tests.replay.storage.collecting.test_never_drawn import episode

HERE = f"/runs/{RUN}/held-out"


@pytest.fixture(scope="module")
def inspector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Evaluations before training, with a success of three episodes, and after iteration 4, with three."""
    path = tmp_path_factory.mktemp("held-out") / "replay.sqlite"
    with closing(new_store(path)) as store:
        for iteration, successes in ((0, 1), (4, 3)):
            made = [episode(number, iteration, success=number < successes) for number in range(3)]
            store.keep_held_out(RUN, [replace(each, stop_reason="max_turns") for each in made], evaluations=9)
    with inspecting(path) as server:
        yield server


def numbers(html: str) -> list[int]:
    return [int(found) for found in re.findall(r'<tr data-href="/runs/[^"]+/held-out/[^"]+"><td>(\d+)</td>', html)]


def test_newest_evaluation_is_listed_and_others_and_failures_lead_to_theirs(inspector: Served) -> None:
    html = inspector.page(HERE)
    assert numbers(html) == [0, 1, 2]
    assert "<strong>4</strong>" in html and f'<a href="{HERE}?iteration=0&amp;only=all">0</a>' in html
    assert "What is 6 times 7?" in html and "max_turns" in html
    assert numbers(inspector.page(f"{HERE}?iteration=0&only=failed")) == [1, 2]
    assert numbers(inspector.page(f"{HERE}?iteration=4&only=failed")) == []
    assert numbers(inspector.page(f"{HERE}?iteration=0&limit=1")) == [0]
    assert f'<a href="{HERE}">held-out episodes</a>' in inspector.page(f"/runs/{RUN}")


def test_one_task_is_shown_through_all_evaluations(inspector: Served) -> None:
    html = inspector.page(f"{HERE}/task-1")
    assert re.findall(r"<h2>([^<]+)</h2>", html) == [
        "After iteration 0: no success, reward 0.00",
        "After iteration 4: success, reward 1.00",
    ]
    assert html.count('<p class="label">calls multiply</p>') == 2
    assert html.count("{&#34;a&#34;: 6, &#34;b&#34;: 7}") == 2
    assert "/messages/" not in html  # no trajectory has them


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        (f"{HERE}?iteration=3", "iteration must be one whose evaluation"),
        (f"{HERE}?only=some", "only must be one of all, success, failed"),
        (f"{HERE}/nothing", "task must name one held-out task"),
    ],
)
def test_what_is_not_there_is_said(inspector: Served, target: str, problem: str) -> None:
    status, text = inspector.problem(target)
    assert (status < 500, problem in text) == (True, True)
