"""Other buffers as sources of a run's draws: `replay.attach`."""

from __future__ import annotations

from functools import partial

from agentloop.assemble import Parts
from replay.exchange.attach import attach


def attach_buffers(parts: Parts) -> None:
    """Copy their rows before the first iteration; what a start that was killed has copied stays as it is.

    A resume copies nothing: the run goes on with the rows it had.
    """
    replay = parts.config.replay
    for name, place in replay.attach.items():
        told = partial(_tell, parts, name)
        allowed = replay.allow_mismatch
        report = attach(parts.store, parts.run_id, name, place, allow_mismatch=allowed, told=told)
        for problem in report.problems:
            parts.display.note(f"replay.attach: left out {problem}")
        parts.display.note(
            f"attached {place} as {name}: {report.rows:,} rows, {report.inserted:,} of them copied now; "
            f"the run can learn from {report.learnable:,}"
        )


def _tell(parts: Parts, name: str, phase: str, done: int) -> None:
    parts.display.phase(f"attach {name}: {phase}", done, done)
