"""The first schema: where migrations begin.

It makes no table. A new database gets those of `replay.storage.format.schema`, and one that has this revision has its
tables already.
"""

from __future__ import annotations

revision = "0011"
down_revision = None


def upgrade() -> None:
    pass
