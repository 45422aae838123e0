"""Experience at rest: what agents did, token by token, and which update learned from it."""

from replay.errors import CorruptTrajectory, DatabaseRefused, InvalidRecord, ReplayError
from replay.records import (
    DrawRecord,
    GroupRecord,
    IterationRecord,
    PolicyRecord,
    RunRecord,
    TaskRecord,
    Trajectory,
    TrajectoryRecord,
)
from replay.sampling import Sampler, make_sampler
from replay.store import AppendReport, Drawn, DrawRequest, ReplayStore, ResumeReport

__all__ = [
    "AppendReport",
    "CorruptTrajectory",
    "DatabaseRefused",
    "DrawRecord",
    "DrawRequest",
    "Drawn",
    "GroupRecord",
    "InvalidRecord",
    "IterationRecord",
    "PolicyRecord",
    "ReplayError",
    "ReplayStore",
    "ResumeReport",
    "RunRecord",
    "Sampler",
    "TaskRecord",
    "Trajectory",
    "TrajectoryRecord",
    "make_sampler",
]
