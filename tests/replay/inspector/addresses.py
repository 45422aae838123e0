"""Addresses of every kind of page, of whatever a database holds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from replay.inspector.app import PAGES
from replay.inspector.server.query_string import address


def page_addresses(runs: tuple[str, str], task: str, ids: Sequence[str], *, held_out: str | None = None) -> list[str]:
    """Of each page at least one, about the first run; those of a cluster and a comparison about both.

    `held_out`: a held-out task; None: there is none.
    """
    run = runs[0]
    found = [
        "/?all=1",
        address("buffer"),
        address("buffer", run=run),
        address("buffer", "overview", run=run),
        address("runs", run),
        address("runs", run, "iterations", 1),
        address("runs", run, "held-out"),
        *([] if held_out is None else [address("runs", run, "held-out", held_out)]),
        *(address("runs", each, "cluster") for each in runs),
        *(address("trajectories", id) for id in ids),
        *(address("trajectories", id, view=view) for id in ids for view in ("tokens", "updates")),
        address("trajectories", ids[0], "tokens", first=1),
        address("trajectories", ids[0], "messages", 0),
        address("tasks", task),
        address("compare", a=ids[0], b=ids[1]),
        address("compare", runs=",".join(runs)),
        address("mixing", run=run),
    ]
    return [each for each in found if _is_page(each)]


def twin_of(target: str) -> str:
    path, mark, query = target.partition("?")
    return ("/index" if path == "/" else path) + ".json" + mark + query


def missing_pages(targets: Iterable[str]) -> list[str]:
    """Paths of pages that none of the addresses is of."""
    paths = [target.partition("?")[0] for target in targets]
    return [page.path for page in PAGES if not any(_pattern(page.path).fullmatch(path) for path in paths)]


def _is_page(target: str) -> bool:
    path = target.partition("?")[0]
    return any(_pattern(page.path).fullmatch(path) for page in PAGES)


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{[^}]*\}", "[^/]+", path))
