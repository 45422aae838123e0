"""Links lead somewhere, whatever a row's own iteration is to this database."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from replay import ReplayStore
from replay.pages.app import create_app
from replay.questions.open_buffer import OpenBuffer
from replay.sampling.samplers import make_sampler
from tests.fakes.records import RUN, group, iterate, new_store, run_record, task, trajectory
from tests.replay.pages.serving import Served, served


@pytest.fixture(scope="module")
def inspector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`mine` of an iteration that was committed, `newest` of one that is not yet, `theirs` of another database."""
    path: Path = tmp_path_factory.mktemp("links") / "replay.sqlite"
    with closing(new_store(path)) as store:
        iterate(store, 1, make_sampler("uniform", 3))
        store.add_run(run_record("import-1"))
        collected = [group(), group("newest", iteration=2), replace(group("theirs", iteration=7), run="import-1")]
        rows = [
            trajectory("mine", slot=90),
            trajectory("newest", iteration=2, group="newest"),
            trajectory("theirs", iteration=7, group="theirs", run="import-1", source="import"),
        ]
        store.append([task()], collected, rows)
    with (
        closing(ReplayStore.open(path, read_only=True)) as reader,
        served(create_app(OpenBuffer(reader))) as found,
    ):
        yield found


def links(inspector: Served, target: str) -> set[str]:
    response = inspector.ask(target)
    assert response.status == 200, response.text
    found = re.findall(r'(?:href|hx-get)="(/[^"#]*)', response.text)
    return {unescape(each) for each in found}


@pytest.mark.parametrize(
    "target",
    ["/trajectories/mine", "/trajectories/newest", "/trajectories/theirs", "/tasks/task-1?run=*", "/runs/import-1"],
)
def test_every_link_leads_somewhere(inspector: Served, target: str) -> None:
    for link in sorted(links(inspector, target)):
        assert inspector.ask(link).status in (200, 303), link


def test_only_an_iteration_that_was_committed_is_a_link(inspector: Served) -> None:
    assert f"/runs/{RUN}/iterations/1" in links(inspector, "/trajectories/mine")
    assert not any("/iterations/" in link for link in links(inspector, "/trajectories/newest"))
    assert {link for link in links(inspector, "/tasks/task-1?run=*") if "/iterations/" in link} == {
        f"/runs/{RUN}/iterations/1"
    }
