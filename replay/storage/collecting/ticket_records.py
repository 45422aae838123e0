"""Records of the episodes that workers collect, and of the participants of a run."""

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
"""The learner no longer wants the episode."""
UNENDED = (QUEUED, LEASED)
TICKET_STATES = (*UNENDED, DONE, FAILED, REVOKED)

TRAIN = "train"
EVALUATION = "eval"
Purpose = Annotated[str, Field(pattern=f"^({TRAIN}|{EVALUATION})$")]
"""The purpose of an episode: to learn from it, or to evaluate the policy."""
MOST_TRIES = 3
"""A ticket fails after this many claims without an answer."""
Place = tuple[int, int]
"""Number and member: the name of a ticket within its run."""
SERVING = "serving"
PUBLISHING = "publishing"
"""States of an engine, as the learner reports them: it serves proved weights, or is about to get new ones."""


@dataclass(frozen=True)
class TicketRecord:
    """One episode for a worker to collect: a member of group `number`. Groups are numbered in the order of issue."""

    run: Id
    number: Count
    member: Count
    task: Id
    iteration: Count
    """The iteration that the episode's batch is planned for. A batch that takes longer is used later."""
    purpose: Purpose = TRAIN


@dataclass(frozen=True)
class PlannedBatch:
    """The plan of a batch that workers collect, as it was when its tickets were issued."""

    run: Id
    iteration: Count
    plan: Mapping[str, Any]
    """The JSON values that the learner needs to compose the batch."""


@dataclass(frozen=True)
class Claim:
    """A ticket in the hands of a worker, until its lease is over."""

    ticket: TicketRecord
    task: TaskRecord
    holder: str
    fence: int
    """A number greater than that of every earlier claim of the ticket."""
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
    """A group whose members have all ended, but that the learner has not closed yet."""

    number: int
    iteration: int
    members: tuple[EndedMember, ...]


@dataclass(frozen=True)
class TicketCounts:
    """Counts of a run's training tickets by state, and of their rows. The rows are counted in other tables: their sum
    is `done` at every moment, or something was lost."""

    queued: int
    leased: int
    failed: int
    revoked: int
    done: int
    fresh: int
    """Rows in a committed batch of their own run."""
    late: int
    """Rows that were too late to be fresh, and are eligible for replay instead."""
    unused: int
    """Rows that never become fresh: without a trained token, damaged or forgotten."""
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
    """Seconds since it was first seen."""
    silent_s: float
    """Seconds since it was last seen."""

    def is_gone(self, lease_s: float) -> bool:
        """Whether it counts as gone: a live worker reports itself three times per lease. A last report in the future is
        from before the clock was put back."""
        return abs(self.silent_s) > lease_s


@dataclass(frozen=True)
class RunView:
    """The facts about its run that a worker needs between two episodes."""

    has_ended: bool
    has_free_tickets: bool
    engines: tuple[Participant, ...]
