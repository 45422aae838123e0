"""Episodes that workers collect, and who takes part in a run: what the store is given of them, and what it answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from replay.records import Count, Id, TaskRecord

QUEUED = "queued"
LEASED = "leased"
DONE = "done"
FAILED = "failed"
REVOKED = "revoked"
"""The learner wants it no more."""
UNENDED = (QUEUED, LEASED)
TICKET_STATES = (*UNENDED, DONE, FAILED, REVOKED)

TRAIN = "train"
EVALUATION = "eval"
Purpose = Annotated[str, Field(pattern=f"^({TRAIN}|{EVALUATION})$")]
"""What an episode is for: to learn from, or to evaluate the policy."""
MOST_TRIES = 3
"""Claims of one ticket that may end without an answer."""
Place = tuple[int, int]
"""Number and member: what names a ticket within its run."""
SERVING = "serving"
PUBLISHING = "publishing"
"""States that the learner reports of an engine: proved for its weights, and about to get others."""


@dataclass(frozen=True)
class TicketRecord:
    """One episode for a worker to collect: a member of the group `number`, numbered in the order of issue."""

    run: Id
    number: Count
    member: Count
    task: Id
    iteration: Count
    """Whose batch it is planned for; a batch that takes longer is learned from later."""
    purpose: Purpose = TRAIN


@dataclass(frozen=True)
class PlannedBatch:
    """What a batch that workers collect is to be made of, from when its tickets are issued."""

    run: Id
    iteration: Count
    plan: Mapping[str, Any]
    """Whatever the learner needs to compose it: JSON values."""


@dataclass(frozen=True)
class Claim:
    """A ticket in the hands of a worker, until its lease is over."""

    ticket: TicketRecord
    task: TaskRecord
    holder: str
    fence: int
    """Greater than that of every earlier claim of the ticket."""
    tries: int

    @property
    def place(self) -> Place:
        return self.ticket.number, self.ticket.member


@dataclass(frozen=True)
class EndedMember:
    member: int
    state: str
    """done | failed | revoked"""
    trajectory: str | None = None
    reason: str | None = None
    outcome: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class EndedGroup:
    """All members have ended, and the learner has not closed it yet."""

    number: int
    iteration: int
    members: tuple[EndedMember, ...]


@dataclass(frozen=True)
class TicketCounts:
    """Training tickets of a run by state, and the rows of those that are done, counted in tables of their own: their
    sum is `done` at every moment, or something was lost."""

    queued: int
    leased: int
    failed: int
    revoked: int
    done: int
    fresh: int
    """In a committed batch of their own run."""
    late: int
    """Eligible for replay instead."""
    unused: int
    """Never to be fresh: without a trained token, damaged or forgotten."""
    waiting: int
    open: int

    @property
    def rows(self) -> int:
        return self.fresh + self.late + self.unused + self.waiting + self.open


@dataclass(frozen=True)
class Participant:
    """A worker or an engine of a run."""

    id: str
    facts: Mapping[str, Any]
    age_s: float
    """Since it was first seen."""
    silent_s: float
    """Since it was last seen."""

    def is_gone(self, lease_s: float) -> bool:
        """Whether nobody counts on it any more: a worker reports itself three times a lease. One that was last seen
        later than now was so before the clock was put back."""
        return abs(self.silent_s) > lease_s


@dataclass(frozen=True)
class RunView:
    """What a worker has to know of its run between two episodes."""

    has_ended: bool
    has_free_tickets: bool
    engines: tuple[Participant, ...]
