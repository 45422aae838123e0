"""A trainer beside an inspector that is asked for a page every second, while somebody labels rows, against one alone.

Trainings alternate, each in a process of its own; a pair's figure is the quotient of the CPU-seconds of both trainers.
The inspector's own time is not in it: only what reading the database costs the process that writes it.
"""

import itertools
import os
import statistics
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import psutil  # type: ignore[import-untyped]

import replay
from benchmarks.inspected_run import inspected
from replay.pages.addresses import address
from tests.fakes.processes import Training, write_config
from tests.fakes.runs import buffer_of, rows, save_qwen2, small_config
from tests.replay.pages.serving import Served, page_addresses

GOALS = {"trainer_cpu_ratio": "<= 1.02"}
ITERATIONS = 120


def asked_every_second(served: Served, run: Path, stop: threading.Event) -> int:
    """The number of pages that were answered: every kind in turn, about what is newest, which is labelled, too."""
    for count in itertools.count():
        if stop.wait(1.0):
            return count
        query = "select id, run, task from trajectories order by iteration desc, slot limit 2"
        (first, id, task), (second, _, _) = rows(buffer_of(run), query)
        targets = [*page_addresses((id, id), task, [first, second]), address("buffer", where=["reward>=0.5"])]
        with replay.open(str(run)) as buffer:
            buffer.label([first], "looked at")
        status = served.ask(targets[count % len(targets)]).status
        assert status < 400, targets[count % len(targets)]
    raise AssertionError


def trained(folder: Path, model: Path, *, asked: bool) -> float:
    """CPU-seconds of a training of its own, from its second iteration to its end."""
    config = small_config(
        folder / "runs",
        model,
        run={"iterations": ITERATIONS},
        replay={"fraction": 0.5},
        evaluation={"every": 20},
        checkpoint={"every": 40, "keep_policies": "none"},
    )
    training = Training(write_config(config, folder / "small.yaml"))
    training.says("iteration 2/")
    run, stop = folder / "runs" / "small-001", threading.Event()
    with inspected(run) if asked else nullcontext((None, None)) as (_, served):
        process = psutil.Process(training.id)
        began, taken = sum(process.cpu_times()[:2]), 0.0
        visitor = threading.Thread(target=asked_every_second, args=(served, run, stop))
        if served is not None:
            visitor.start()
        while not training.ended:
            taken = max(taken, sum(process.cpu_times()[:2]))
            time.sleep(0.02)
        stop.set()
        if served is not None:
            visitor.join()
    assert training.wait() == 0, training.errors
    return float(taken - began)


def main(pairs: int = 7) -> dict[str, float]:
    print(f"a trainer of {ITERATIONS} iterations, with an inspector asked every second and without, {pairs} pairs")
    if sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2:
        print("  left out: trainer and inspector need a core each")
        return {}
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        model = save_qwen2(Path(folder) / "model", layers=2)
        for pair in range(pairs):
            seconds = {}
            for asked in (bool(pair % 2), not pair % 2):
                place = Path(folder) / f"{pair}-{asked}"
                place.mkdir()
                seconds[asked] = trained(place, model, asked=asked)
            ratios.append(seconds[True] / seconds[False])
            print(f"  {seconds[True]:.1f} s with, {seconds[False]:.1f} s without", flush=True)
    return {"trainer_cpu_ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
