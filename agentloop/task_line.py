"""Whose turn it is: the tasks of a run in order, none left out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass
class TaskLine:
    """Indices of training tasks, in the order they are gone through."""

    next: int = 0
    """The first that has never been in a batch."""
    owed: list[int] = field(default_factory=list)
    """Planned for a batch in which they then had no member: theirs were to be replayed, and could not be drawn."""

    def upcoming(self, count: int) -> list[int]:
        """The next `count`; what is owed comes first."""
        return [*self.owed, *range(self.next, self.next + count)][:count]

    def advance(self, indices: Collection[int], *, without_member: Collection[int] = ()) -> None:
        """`indices`, the upcoming ones, have been in a batch, but for those `without_member`."""
        self.next = max(self.next, 1 + max(indices, default=-1))
        self.owed = [*sorted(without_member), *(index for index in self.owed if index not in indices)]
