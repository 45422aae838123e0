"""The metrics that a run's page shows, out of all that a run logs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from replay.queries import metric_series
from replay.queries.runs import ALL
from replay.report.panels import FAMILIES, Metrics, panel_groups
from replay.report.svg import Series
from replay.report.tiles import tiles
from replay.store import ReplayStore


def shown_series(store: ReplayStore, run: str) -> Metrics:
    """What the panels and tiles of a run are made from, iteration by iteration."""
    return metric_series(store, run, names=sorted({*_asked(panel_groups), *_asked(tiles)}), families=FAMILIES)


def panel_series(store: ReplayStore, run: str, merged: int, within: range = ALL) -> Metrics:
    """What the panels are made from, `merged` iterations to a point."""
    names = _asked(panel_groups)
    return metric_series(store, run, names=names, families=FAMILIES, within=within, merged=merged)


def tile_series(store: ReplayStore, run: str) -> Metrics:
    """What the tiles are made from: few metrics, of every iteration."""
    return metric_series(store, run, names=_asked(tiles))


class _NamesRead(dict[str, Series]):
    """Metrics that all have one point, and remember which ones were looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def get(self, key: str, default: object = None) -> Series:
        self.names.add(key)
        return ((1, 1.0),)


@cache
def _asked(made: Callable[[Metrics, dict[str, object]], object]) -> tuple[str, ...]:
    """The names that panels or tiles are made from."""
    asked = _NamesRead()
    made(asked, {})
    return tuple(sorted(asked.names))
