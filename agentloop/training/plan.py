"""Whose turn it is: the tasks of a run in order, none left out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class TaskQueue:
    """Indices of training tasks, in the order they are gone through."""

    next: int = 0
    """The first that has never been in a batch."""
    pending: list[int] = field(default_factory=list)
    """Planned for a batch in which they then had no member: theirs were to be replayed, and could not be drawn."""

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> TaskQueue:
        """The queue of a checkpoint, also of an earlier version, which called `pending` owed."""
        return cls(values["next"], list(values.get("pending", values.get("owed", ()))))

    def upcoming(self, count: int) -> list[int]:
        """The next `count`; what is pending comes first."""
        return [*self.pending, *range(self.next, self.next + count)][:count]

    def advance(self, indices: Collection[int], *, without_member: Collection[int] = ()) -> None:
        """`indices`, the upcoming ones, have been in a batch, but for those `without_member`."""
        self.next = max(self.next, 1 + max(indices, default=-1))
        self.pending = [*sorted(without_member), *(index for index in self.pending if index not in indices)]
