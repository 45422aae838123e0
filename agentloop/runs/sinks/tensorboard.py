"""`metrics.sinks: [tensorboard]`: curves under <run folder>/tensorboard."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentloop.runs.sinks.metric_sinks import without_package

FOLDER_NAME = "tensorboard"


class TensorBoardSink:
    """Each metric as a scalar at its iteration; what is unknown (NaN) is no point."""

    def __init__(self, folder: Path, *, keep_through: int | None = None) -> None:
        """TensorBoard no longer shows what earlier files in `folder` say of iterations after `keep_through`."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise without_package("tensorboard") from error
        writer: Any = SummaryWriter
        purged = None if keep_through is None else keep_through + 1
        self._writer = writer(str(folder / FOLDER_NAME), purge_step=purged)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, iteration)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
