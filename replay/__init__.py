"""Experience at rest: what agents did, token by token, and which update learned from it."""

from replay.errors import ConnectionLost, CorruptTrajectory, DatabaseRefused, InvalidRecord, ReplayError, RunReplaced
from replay.frames import ArrowRows, Buffer
from replay.frames import open_run as open
from replay.mixing.request import Availability, DrawRequest, Limits, Pick
from replay.records import (
    BatchRow,
    DrawRecord,
    GroupRecord,
    IterationRecord,
    PolicyRecord,
    RunRecord,
    TaskRecord,
    Trajectory,
    TrajectoryRecord,
    group_of,
)
from replay.sampling.samplers import Rows, Sampler, make_sampler
from replay.storage.draw_records import ResumeReport
from replay.storage.write import AppendReport
from replay.store import ReplayStore

__all__ = [
    "AppendReport",
    "ArrowRows",
    "BatchRow",
    "Buffer",
    "Availability",
    "ConnectionLost",
    "CorruptTrajectory",
    "DatabaseRefused",
    "DrawRecord",
    "DrawRequest",
    "GroupRecord",
    "InvalidRecord",
    "IterationRecord",
    "Limits",
    "Pick",
    "PolicyRecord",
    "ReplayError",
    "ReplayStore",
    "ResumeReport",
    "Rows",
    "RunRecord",
    "RunReplaced",
    "Sampler",
    "TaskRecord",
    "Trajectory",
    "TrajectoryRecord",
    "group_of",
    "make_sampler",
    "open",
]
