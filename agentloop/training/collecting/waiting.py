"""The learner waits for workers: people see how far they are, and are shown how to start one where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable

from agentloop.training.components import Components
from replay.ticket_records import TRAIN, Purpose

_LOOK_AGAIN_S = 0.1
_NOBODY_S = 30.0
"""Seconds without a word of any worker after which people are shown how to start one."""


class StoppedWaiting(Exception):
    """Asked to stop while episodes were still under way: what needed them has not begun."""


class Waiting:
    """Looks at tickets until all of an iteration have ended."""

    def __init__(self, components: Components, *, stopped: Callable[[], bool]) -> None:
        self._components = components
        self._stopped = stopped

    def until_ended(self, iteration: int, purpose: Purpose = TRAIN) -> int:
        """How many episodes there are. Raises StoppedWaiting where they were to be trained on."""
        store, run = self._components.store, self._components.run_id
        phase = "collect" if purpose == TRAIN else "evaluate"
        shown_at, episodes = time.monotonic(), store.tickets.episodes(run, iteration, purpose)
        while under_way := store.tickets.under_way(run, iteration, purpose):
            self._components.display.phase(phase, episodes - under_way, episodes)
            # An evaluation belongs to an iteration that is learned from already.
            if purpose == TRAIN and self._stopped():
                raise StoppedWaiting
            if time.monotonic() - shown_at > _NOBODY_S:
                shown_at = time.monotonic() if self._someone_is_there() else self._show_how()
            time.sleep(_LOOK_AGAIN_S)
        return episodes

    def _someone_is_there(self) -> bool:
        lease_s = self._components.config.collection.lease_s
        listed = self._components.store.roles.listed("worker", self._components.run_id)
        return not all(worker.is_gone(lease_s) for worker in listed)

    def _show_how(self) -> float:
        """The time from which on nothing more needs to be shown."""
        self._components.display.note(f"waiting for a worker: agentloop worker --run {self._components.folder.path}")
        return float("inf")
