"""Links lead somewhere, whatever a row's own iteration is to this database."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from html import unescape

import pytest

from replay.sampling.samplers import make_sampler
from tests.fakes.records import RUN, group, iterate, new_store, run_record, task, trajectory
from tests.replay.pages.serving import Served, inspecting


@pytest.fixture(scope="module")
def inspector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`mine` of an iteration that was committed, `newest` of one that is not yet, `theirs` of another database."""
    path = tmp_path_factory.mktemp("links") / "replay.sqlite"
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
    with inspecting(path) as found:
        yield found


@pytest.mark.parametrize(
    ("target", "iterations"),
    [
        ("/trajectories/mine", {f"/runs/{RUN}/iterations/1"}),
        ("/trajectories/newest", set()),  # only one that was committed is a link
        ("/trajectories/theirs", set()),
        ("/tasks/task-1?run=*", {f"/runs/{RUN}/iterations/1"}),
        ("/runs/import-1", set()),
    ],
)
def test_every_link_leads_somewhere(inspector: Served, target: str, iterations: set[str]) -> None:
    links = {unescape(each) for each in re.findall(r'(?:href|hx-get)="(/[^"#]*)', inspector.page(target))}
    assert {link for link in links if "/iterations/" in link} == iterations
    for link in sorted(links):
        assert inspector.ask(link).status in (200, 303), link
