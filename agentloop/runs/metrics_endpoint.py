"""What Prometheus reads of one role: gauges at a port of its own, for whatever the role measures. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from agentloop.errors import UserError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_PREFIX = "agentloop"
_LABELS = ("run", "role")
Measure = Callable[[str, float], None]
"""Called with the name of what a role measures, as metrics.jsonl would have it, and its value now."""


def no_measure(name: str, value: float) -> None:
    """Nobody reads what is measured."""


class Gauges:
    """The last value of each metric, with the run and the role as labels."""

    def __init__(self, registry: CollectorRegistry, *, role: str) -> None:
        self._registry = registry
        self._role = role
        self._gauges: dict[str, Any] = {}

    def set(self, name: str, value: float, *, run: str) -> None:
        """`name` as metrics.jsonl has it; NaN where the value is unknown. `run`: the name of its folder."""
        known = gauge_name(name)
        if known not in self._gauges:
            from prometheus_client import Gauge

            self._gauges[known] = Gauge(known, name, _LABELS, registry=self._registry)
        self._gauges[known].labels(run, self._role).set(value)


def gauge_name(metric: str) -> str:
    """`actor/entropy` as Prometheus may call it: `agentloop_actor_entropy`."""
    return f"{_PREFIX}_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)


def measure_at(port: int | None, *, role: str, run: str) -> Measure:
    """What a role of a run measures is read at this port; nowhere without one."""
    return no_measure if port is None else partial(serve_metrics(port, role=role).set, run=run)


def serve_metrics(port: int, *, role: str) -> Gauges:
    """Serve gauges at http://HOST:`port`/metrics, on all addresses, as long as this program runs.

    Memory, processor time and open files of the process are among them. Raises UserError where that can't be.
    """
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
    except ImportError as error:
        raise UserError(
            f"--metrics-port must be left out without Prometheus's client, got {port}. "
            "Install the extra: pip install 'agentloop-replay[prometheus]'."
        ) from error
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    try:
        start_http_server(port, registry=registry)
    except OSError as error:
        raise UserError(f"--metrics-port must be free, got {port} ({error.strerror}). Choose another.") from error
    return Gauges(registry, role=role)
