"""Who waits for whom, in one sentence made from what the database knows of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from context.wording import excerpt
from replay.questions.filters.query import QueryResult
from replay.ticket_records import SERVING

_LONGEST_NAME = 60
_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


@dataclass(frozen=True)
class Standing:
    """The facts of a run that the sentence is made from, as `questions.cluster` has them."""

    ended: bool
    leader: QueryResult | None
    iteration: int
    """The iteration that the learner works on."""
    is_updating: bool
    """True if the batch of that iteration is composed."""
    batch: QueryResult | None
    evaluations: int
    """Evaluation episodes under way."""
    under_way: int
    """Episodes of either purpose that are queued or leased."""
    issued: int
    """Tickets of either purpose, ever."""
    workers: Sequence[QueryResult]
    engines: Sequence[QueryResult]


class Waits(NamedTuple):
    who: str
    """learner, workers or nobody."""
    text: str
    advice: str | None = None
    """worker or learner: what to start where nothing goes on by itself."""


def who_waits(run: Standing) -> Waits:
    """The learner, the workers or nobody, for whom and since when; and what to start where nothing goes on."""
    if run.ended:
        return Waits("nobody", "The run has ended: nobody waits.")
    if not run.issued and not run.workers:
        return Waits("nobody", "No ticket has been issued: the training process collects by itself.")
    count, gone, idle = counted(run.under_way, "issued episode"), _no_worker(run), _no_engine(run)
    if run.leader is None or not run.leader["holds"]:
        reason = "no learner leads this run" if run.leader is None else _over(run.leader)
        if run.under_way and not gone:
            return Waits("nobody", f"Workers still collect {count}, but {reason}.", "learner")
        return Waits("workers", f"Workers wait for a learner: {reason}.", "learner")
    if needed := _needed(run):
        why = f", and {gone or idle}" if gone or idle else ""
        return Waits("learner", f"The learner waits for {needed}{why}.", "worker" if gone else None)
    if not run.under_way:
        why = "the learner updates" if run.issued else "the learner has issued none yet"
        return Waits("workers", f"Workers wait for tickets: {why}.")
    if gone:
        return Waits("nobody", f"The learner updates, but nobody collects {count}: {gone}.", "worker")
    if idle:
        return Waits("workers", f"The learner updates, and workers wait for an engine: {idle}.")
    return Waits("nobody", f"Nobody waits: the learner updates, and workers collect {count}.")


def _over(leader: QueryResult) -> str:
    name = excerpt(leader["id"], _LONGEST_NAME)
    return f"the lease of the learner {name} is over since {seconds(-leader['lease_s'])}"


def _needed(run: Standing) -> str | None:
    """What the learner can't go on without. A batch that is composed needs nothing; a later one is not waited for."""
    if run.evaluations:
        return counted(run.evaluations, "evaluation episode")
    batch = run.batch
    # Batches are counted apart from iterations, some of which learn from replayed rows alone: it is never ahead.
    if batch is None or not batch["missing_groups"] or run.is_updating or batch["number"] > run.iteration:
        return None
    return f"{batch['missing_groups']} of {counted(batch['groups'], 'group')} of batch {batch['number']}"


def _no_worker(run: Standing) -> str | None:
    """Why none of them can be counted on; None: one can."""
    if not run.workers:
        return "no worker takes part"
    silent = seconds(min(each["silent_s"] for each in run.workers))
    return f"no worker has reported for {silent}" if all(each["gone"] for each in run.workers) else None


def _no_engine(run: Standing) -> str | None:
    """Why no engine answers; one is reported when a policy is brought to it, so that silence says nothing."""
    serving = not run.engines or any(each["state"] == SERVING for each in run.engines)
    return None if serving else "no engine is serving"


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def seconds(value: float) -> str:
    """A time as people say it: 41 s, 3 min, 2 h; two of a unit at least."""
    for size, unit in _UNITS:
        if value >= 2 * size:
            return f"{value / size:.0f} {unit}"
    return f"{max(0.0, value):.0f} s"


def advised_command(advice: str | None, folder: Path | None) -> list[str]:
    """What somebody could type, with the run's folder where that is known."""
    if advice == "worker":
        return ["agentloop", "worker", "--run", "RUN" if folder is None else str(folder)]
    return ["agentloop", "train", "CONFIG", "--resume"] if advice == "learner" else []
