"""A run may be made longer or shorter when it is resumed; what it has done must keep its meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentloop.config import RunConfig
from agentloop.config.config_file import load_plain, to_plain
from agentloop.errors import UserError

_ITS_END = ("iterations", "stop_at_success")
"""Keys of `run` that a resumed run may have other values of: none of them says what an iteration does."""


def what_iterations_do(config: RunConfig) -> dict[str, Any]:
    """The configuration as `to_plain` gives it, without what may be another when a run is resumed."""
    values = to_plain(config)
    run = {name: value for name, value in values["run"].items() if name not in _ITS_END}
    return {**values, "run": {**run, "schedule_iterations": config.run.schedule_length}}


def with_former_schedules(former: RunConfig, config: RunConfig) -> RunConfig:
    """`config` with the schedules of the run as it was begun: laid over as many iterations as then.

    Laid over more, they would have given earlier iterations other learning rates and other shares of replay.
    """
    length, asked = former.run.schedule_length, config.run.schedule_iterations
    if asked is not None or (former.run.schedule_iterations is None and config.run.iterations == length):
        return config
    values = to_plain(config)
    values["run"] |= {"schedule_iterations": length}
    return load_plain(values, source="resumed run")


def check_length(config: RunConfig, done: int, run: Path) -> None:
    """Raises UserError where the run has made more iterations than it is to have."""
    if config.run.iterations < done:
        raise UserError(
            f"run.iterations must be at least the {done} iterations that {run} has made, got {config.run.iterations}. "
            "Raise it, or start a new run without --resume."
        )
