"""`metrics.sinks: [trackio]`: a run of Hugging Face's trackio, whose dashboard is `trackio show`."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentloop.runs.sinks.metric_sinks import without_package

_PROJECT = "agentloop"


class TrackioSink:
    """On this machine, where trackio keeps all its runs (TRACKIO_DIR), unless TRACKIO_SPACE_ID or the like is set.

    The run is named after its folder and id, so that a resumed one goes on in the same; iterations that a resume
    repeats are there twice, with the same values. TRACKIO_PROJECT names another project than `agentloop`.
    """

    def __init__(self, folder: Path) -> None:
        """Raises UserError for a missing package, and what trackio raises where a server of it can't be reached."""
        try:
            import trackio
        except ImportError as error:
            raise without_package("trackio") from error
        made: dict[str, Any] = json.loads((folder / "run.json").read_text())
        with _silent():
            self._run: Any = trackio.init(
                os.environ.get("TRACKIO_PROJECT", _PROJECT),
                name=f"{folder.name}-{made['id'][:8]}",
                config=made["config"],
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._run.log({name: value for name, value in metrics.items() if math.isfinite(value)}, step=iteration)

    def close(self) -> None:
        import trackio

        with _silent():
            trackio.finish()  # rather than the run's own, which would be called once more as the program ends


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Standard output is for what programs read of the run."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
