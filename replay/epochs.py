"""Which process writes a run: whoever resumes it takes it over, and the one before can write nothing more."""

from __future__ import annotations

import sqlalchemy as sa

from replay.errors import ReplayError, RunReplaced
from replay.prepared import execute
from replay.schema import runs

_RUN = runs.c.id == sa.bindparam("run")
_EPOCH = sa.select(runs.c.epoch).where(_RUN)
_NEXT = runs.update().where(_RUN).values(epoch=runs.c.epoch + 1).returning(runs.c.epoch)


def take_over(connection: sa.Connection, run: str) -> int:
    """The run's next epoch; from now on nobody writes it who began an earlier one."""
    epoch = execute(connection, _NEXT, run=run).scalar_one_or_none()
    if epoch is None:
        raise ReplayError(f"run must be one that the database knows, got {run!r}. Add it first.")
    return int(epoch)


def refuse_replaced(connection: sa.Connection, run: str, epoch: int) -> None:
    """Raises RunReplaced where another process has taken the run over since `epoch` began."""
    newest = execute(connection, _EPOCH, run=run).scalar()
    if newest != epoch:
        raise RunReplaced(
            f"run must be written by one process at a time, got epoch {newest} where this process began epoch {epoch}: "
            f"{run} was resumed by another one. Nothing of this call was stored; let the other one go on."
        )
