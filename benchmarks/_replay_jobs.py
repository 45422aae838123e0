"""Which runs the results lack: first those that tune each contender on each task, then all arms with what was found."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from benchmarks._replay_arms import (
    ARMS,
    BUDGET,
    KEPT,
    SETTINGS,
    TASKS,
    TUNING_SEEDS,
    Job,
    Key,
)
from benchmarks._replay_figures import to_target
from benchmarks._replay_runs import Result

Found = Mapping[Key, Result]


def score(result: Result) -> float:
    """Fresh episodes to the target; beyond the budget by what was missing, where it was not reached."""
    reached = to_target(result, "fresh")
    successes = sum(row[0] * row[2] for row in result["iterations"])
    return reached if math.isfinite(reached) else 2 * BUDGET - successes


def tuning(task: str, contender: str, found: Found) -> Iterator[Job]:
    """Runs that are still to be made, as far as they are known: the next seed is for the best settings so far."""
    settings = list(SETTINGS)
    for seed, kept in zip(TUNING_SEEDS, KEPT, strict=True):
        settings = _best(task, contender, settings, found)[:kept]
        missing = [job for name in settings if (job := Job(task, contender, name, seed)).key not in found]
        if missing:
            yield from missing
            return


def _best(task: str, contender: str, settings: Sequence[str], found: Found) -> list[str]:
    """By the median over the seeds that each was tried on."""

    def median(name: str) -> float:
        keys = [(task, contender, name, seed) for seed in TUNING_SEEDS]
        return statistics.median([score(found[key]) for key in keys if key in found] or [math.inf])

    return sorted(settings, key=median)


def tuned(task: str, contender: str, found: Found) -> str | None:
    """The setting that was found; None before."""
    if any(tuning(task, contender, found)):
        return None
    last = [name for name in SETTINGS if (task, contender, name, TUNING_SEEDS[-1]) in found]
    return _best(task, contender, last, found)[0]


def jobs(tasks: Sequence[str], arms: Sequence[str], seeds: Sequence[int], found: Found) -> list[Job]:
    """All that can be begun now."""
    contenders = {ARMS[arm].contender: None for arm in arms}
    tuned_as = {task: TASKS[task].tuned_as or task for task in tasks}
    places = {(like, contender): None for like in tuned_as.values() for contender in contenders}
    ready = [job for place in places for job in tuning(*place, found)]
    settings = {place: tuned(*place, found) for place in places}
    for seed in seeds:
        for task in tasks:
            for arm in arms:
                setting = settings[tuned_as[task], ARMS[arm].contender]
                if setting is None or task not in ARMS[arm].tasks:
                    continue
                job = Job(task, arm, setting, seed)
                if job.key not in found:
                    ready.append(job)
    return ready
