"""Addresses of every kind of page, of whatever a database holds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from replay.pages.addresses import address
from replay.pages.app import PAGES


def page_addresses(runs: tuple[str, str], task: str, ids: Sequence[str], *, held_out: str | None = None) -> list[str]:
    """Of each page at least one, about the first run; of a cluster and of all runs about both.

    `held_out`: a held-out task; None: there is none.
    """
    run = runs[0]
    return [
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
        address("trajectories", ids[0], "tokens.json", first=1),
        address("trajectories", ids[0], "messages", 0),
        address("tasks", task),
        address("compare", id=[*ids[:3]]),
        address("", all=1, show=list(runs)),
        address("mixing", run=run),
    ]


def missing_pages(targets: Iterable[str]) -> list[str]:
    """Paths of pages that none of the addresses is of."""
    paths = [target.partition("?")[0] for target in targets]
    patterns = {page.path: re.compile(re.sub(r"\{[^}]*\}", "[^/]+", page.path)) for page in PAGES}
    return [path for path, pattern in patterns.items() if not any(map(pattern.fullmatch, paths))]
