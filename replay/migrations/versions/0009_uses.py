"""A row's uses are its replayed draws; a run's rows, reservations and the groups of a task are found by indexes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

_REPLAYED = (
    "SELECT count(*) FROM draws WHERE trajectory = trajectories.id AND state = 'committed' AND stream = 'replay'"
)
_COUNT_USES = f"UPDATE trajectories SET uses = ({_REPLAYED}) WHERE uses > 0"  # noqa: S608  constant text
_FORGET_ROLLBACKS = "DELETE FROM buffer_state WHERE name = 'rollbacks'"


def upgrade() -> None:
    op.execute(_COUNT_USES)
    op.execute(_FORGET_ROLLBACKS)
    op.drop_index("trajectories_by_change", "trajectories")
    op.create_index("trajectories_by_change", "trajectories", ["run", "changed"])
    imported = sa.text("source <> 'self' and source <> 'gateway'")
    op.create_index("imports_by_change", "trajectories", ["changed"], sqlite_where=imported, postgresql_where=imported)
    reserved = sa.text("state = 'reserved'")
    op.create_index("reservations_by_sequence", "draws", ["sequence"], sqlite_where=reserved, postgresql_where=reserved)
    op.create_index("groups_by_run", "groups", ["run", "iteration"])
    op.create_index("groups_by_task", "groups", ["task", "run"])
