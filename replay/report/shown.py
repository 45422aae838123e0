"""The metrics that a run's page shows, out of all that a run logs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from replay.report.chart import Series
from replay.report.panels import FAMILIES, Metrics, panel_groups
from replay.report.tiles import tiles
from replay.stats import metric_series
from replay.store import ReplayStore


def shown_series(store: ReplayStore, run: str, *, besides: Sequence[str] = ()) -> Metrics:
    """What the panels and tiles of a run are made from, and the metrics named `besides`."""
    return metric_series(store, run, names=[*_names(), *besides], families=FAMILIES)


class _Asked(dict[str, Series]):
    """Metrics that all have one point, and remember which ones were looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def get(self, key: str, default: object = None) -> Series:
        self.names.add(key)
        return ((1, 1.0),)


@cache
def _names() -> tuple[str, ...]:
    asked = _Asked()
    panel_groups(asked, {})
    tiles(asked, {})
    return tuple(sorted(asked.names))
