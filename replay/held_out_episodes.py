"""`HeldOutEpisodes`: what evaluations were asked and answered, as a part of the store."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from replay.records import HeldOutEpisode
from replay.storage.collecting import held_out_rows
from replay.storage.databases import Database, WriteOfRuns


class HeldOutEpisodes:
    """Every method is one transaction, and may be done again."""

    def __init__(self, database: Database, write: WriteOfRuns) -> None:
        self._database = database
        self._write = write

    def put(self, run: str, episodes: Sequence[HeldOutEpisode], *, keep: int) -> None:
        """Those of an evaluation, in place of what stood in their places; all but the newest `keep` evaluations go."""
        compressed = self._database.compresses_text

        def work(connection: sa.Connection) -> None:
            held_out_rows.put(connection, episodes, compressed=compressed)
            held_out_rows.keep_newest(connection, run, keep)

        self._write(work, run)
