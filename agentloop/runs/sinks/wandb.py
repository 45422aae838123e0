"""`metrics.sinks: [wandb]`: a Weights & Biases run, kept in <run folder>/wandb until it is synced."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
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
