"""`agentloop train --metrics-port`: the last iteration's metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping

from agentloop.runs.metrics_endpoint import Gauges


class GaugeSink:
    """Each metric as a gauge; what an iteration did not measure is as it was measured last."""

    def __init__(self, gauges: Gauges, run: str) -> None:
        self._gauges, self._run = gauges, run

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        for name, value in {"iteration": float(iteration), **metrics}.items():
            self._gauges.set(name, value, run=self._run)

    def close(self) -> None:
        """The endpoint ends with the program."""
