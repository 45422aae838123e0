"""The tickets that a worker holds, and how many more it may claim."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from replay.ticket_records import MOST_TRIES, Claim, Place


class HeldClaims:
    """A ticket in its last try is run by itself: should it end this worker, no other one has lost a try by it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[Place, Claim] = {}
        self._alone: Place | None = None
        """In its last try."""
        self._makes_room = False
        """A ticket in its last try waits until this worker holds no other."""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def all(self) -> list[Claim]:
        return list(self._held.values())

    @property
    def wanted(self) -> int:
        """How many to claim now."""
        if self._makes_room:
            return 0 if self._held else 1
        return 0 if self._alone is not None else self._most - len(self._held)

    def add(self, claims: Sequence[Claim]) -> tuple[list[Claim], list[Claim]]:
        """What is held and run from now on, and what must be given back."""
        last = [claim for claim in claims if claim.tries >= MOST_TRIES]
        others = [claim for claim in claims if claim.tries < MOST_TRIES]
        if last and not others and not self._held:
            others, last = last[:1], last[1:]
            self._alone = others[0].place
        self._makes_room = bool(last)
        self._held.update({claim.place: claim for claim in others})
        return others, last

    def drop(self, places: Iterable[Place]) -> None:
        """They have ended, or are another's."""
        for place in places:
            self._held.pop(place, None)
            if place == self._alone:
                self._alone = None
