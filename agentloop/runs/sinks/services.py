"""`metrics.sinks: [tensorboard, wandb, trackio]`: curves in the tools that people have."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentloop.errors import UserError, one_line
from agentloop.runs.sinks.metric_sinks import without_package

_PROJECT = "agentloop"
_OFFLINE = "offline"
_UPLOAD_S = "60"
"""Seconds that the end of an online run waits for uploads; W&B's own default is without end."""


class WandbSink:
    """Offline unless WANDB_MODE says otherwise: training never waits for a network that nobody asked for.

    WANDB_PROJECT, WANDB_ENTITY and the rest of W&B's environment hold. The run has our run's id, so that a resumed
    one goes on in the same; W&B ignores iterations it has already, which a resume repeats with the same values.
    """

    def __init__(self, folder: Path) -> None:
        """Raises UserError for a missing package or key, and what W&B raises where its server can't be reached."""
        try:
            import wandb
        except ImportError as error:
            raise without_package("wandb") from error
        made: dict[str, Any] = json.loads((folder / "run.json").read_text())
        mode: Any = os.environ.get("WANDB_MODE", _OFFLINE)
        # Where it would keep logs of its own; nothing is written outside the run folder.
        os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "wandb" / "cache"))
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", _UPLOAD_S)
        try:
            self._run: Any = wandb.init(
                mode=mode,
                project=os.environ.get("WANDB_PROJECT", _PROJECT),
                id=made["id"],
                name=folder.name,
                config=made["config"],
                dir=str(folder),
                resume="allow" if mode == "online" else None,
                # The console is the display's, and the code is not W&B's business.
                settings=wandb.Settings(console="off", silent=True, save_code=False, disable_git=True),
            )
        except wandb.errors.UsageError as error:
            raise UserError(
                f"WANDB_MODE must be offline where W&B can't be used, got {mode} with {one_line(error)}. "
                "Unset it, or run wandb login."
            ) from error

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        known = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._run.log(known, step=iteration)

    def close(self) -> None:
        self._run.finish()


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
