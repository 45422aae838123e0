"""Who waits for whom, in one sentence made from what the database knows of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from context.wording import excerpt
from replay.questions.filters.query import QueryResult
from replay.ticket_records import SERVING

_LONGEST_NAME = 60


class Waiter(StrEnum):
    learner = "learner"
    workers = "workers"
    nobody = "nobody"


class Advice(StrEnum):
    """What would help, where somebody has to do something."""

    worker = "worker"
    learner = "learner"


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
    first: QueryResult | None
    """The oldest episode under way of what comes first: evaluations, then that batch."""
    evaluations: int
    """Evaluation episodes under way."""
    under_way: int
    """Episodes of either purpose that are queued or leased."""
    issued: int
    """Tickets of either purpose, ever."""
    workers: Sequence[QueryResult]
    engines: Sequence[QueryResult]

    @property
    def is_led(self) -> bool:
        return self.leader is not None and bool(self.leader["holds"])


@dataclass(frozen=True)
class WhoWaits:
    who: Waiter
    text: str
    advice: Advice | None = None


def who_waits(standing: Standing) -> WhoWaits:
    """The learner, the workers or nobody, for whom and since when; and what to do where nothing goes on by itself."""
    if standing.ended:
        return WhoWaits(Waiter.nobody, "The run has ended: nobody waits.")
    if not standing.issued and not standing.workers:
        return WhoWaits(Waiter.nobody, "No ticket has been issued: the training process collects by itself.")
    if not standing.is_led:
        return _without_learner(standing)
    needed = _needed(standing)
    if needed is not None:
        return _for_episodes(standing, f"The learner waits for {needed}")
    gone = _no_worker(standing)
    if not standing.under_way:
        why = "the learner updates" if standing.issued else "the learner has issued none yet"
        return WhoWaits(Waiter.workers, f"Workers wait for tickets: {why}.")
    count = counted(standing.under_way, "issued episode")
    if gone:
        return WhoWaits(Waiter.nobody, f"The learner updates, but nobody collects {count}: {gone}.", Advice.worker)
    idle = _no_engine(standing)
    if idle:
        return WhoWaits(Waiter.workers, f"The learner updates, and workers wait for an engine: {idle}.")
    return WhoWaits(Waiter.nobody, f"Nobody waits: the learner updates, and workers collect {count}.")


def _without_learner(standing: Standing) -> WhoWaits:
    leader = standing.leader
    if leader is None:
        reason = "no learner leads this run"
    else:
        reason = f"the lease of the learner {_name(leader['id'])} is over since {seconds(-leader['lease_s'])}"
    if standing.under_way and not _no_worker(standing):
        text = f"Workers still collect {counted(standing.under_way, 'issued episode')}, but {reason}."
        return WhoWaits(Waiter.nobody, text, Advice.learner)
    return WhoWaits(Waiter.workers, f"Workers wait for a learner: {reason}.", Advice.learner)


def _needed(standing: Standing) -> str | None:
    """What the learner can't go on without. A batch that is composed needs nothing; a later one is not waited for."""
    if standing.evaluations:
        return counted(standing.evaluations, "evaluation episode")
    batch = standing.batch
    # Batches are counted apart from iterations, some of which learn from replayed rows alone: it is never ahead.
    if batch is None or not batch["missing_groups"] or standing.is_updating or batch["number"] > standing.iteration:
        return None
    return f"{batch['missing_groups']} of {counted(batch['groups'], 'group')} of batch {batch['number']}"


def _for_episodes(standing: Standing, begin: str) -> WhoWaits:
    gone = _no_worker(standing)
    if gone:
        return WhoWaits(Waiter.learner, f"{begin}, and {gone}.", Advice.worker)
    idle = _no_engine(standing)
    if idle:
        return WhoWaits(Waiter.learner, f"{begin}, and {idle}.")
    return WhoWaits(Waiter.learner, f"{begin}{_of_oldest(standing.first)}.")


def _of_oldest(episode: QueryResult | None) -> str:
    if episode is None:
        return ""
    begin = f"; the oldest episode was issued {seconds(episode['age_s'])} ago"
    if episode["holder"] is None:
        return f"{begin}, and no worker has claimed it"
    if episode["lease_s"] is not None and episode["lease_s"] < 0:
        return f"{begin}, and the lease of {_name(episode['holder'])} on it is over: another worker may claim it"
    return f"{begin} and is with {_name(episode['holder'])}"


def _no_worker(standing: Standing) -> str | None:
    """Why none of them can be counted on; None: one can."""
    if not standing.workers:
        return "no worker takes part"
    if not all(each["gone"] for each in standing.workers):
        return None
    return f"no worker has reported for {seconds(min(each['silent_s'] for each in standing.workers))}"


def _no_engine(standing: Standing) -> str | None:
    """Why no engine answers; one is reported when a policy is brought to it, so that silence says nothing."""
    if not standing.engines or any(each["state"] == SERVING for each in standing.engines):
        return None
    return "no engine is serving"


def _name(id: str) -> str:
    return excerpt(id, _LONGEST_NAME)


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def seconds(value: float) -> str:
    """A time as people say it: 41 s, 3 min, 2 h; two of a unit at least."""
    for size, unit in _UNITS:
        if value >= 2 * size:
            return f"{value / size:.0f} {unit}"
    return f"{max(0.0, value):.0f} s"


def advised_command(advice: str | None, folder: Path | None) -> list[str]:
    """What somebody could type, with the run's folder where that is known."""
    if advice == Advice.worker:
        return ["agentloop", "worker", "--run", "RUN" if folder is None else str(folder)]
    return ["agentloop", "train", "CONFIG", "--resume"] if advice == Advice.learner else []
