"""An inspector looked at while a trainer and eight more processes write: it hardly grows and is in nobody's way.

`python -m benchmarks.inspected_run --minutes 60`, on a server with `--database URL`: one that has no table yet. In the
first minutes caches fill, which counts as growth. Without `--minutes` nothing is measured.
"""

import argparse
import math
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from replay.pages.addresses import address
from replay.storage.databases import Location
from tests.fakes.environments import ENVIRONMENTS
from tests.fakes.processes import Program, Training, assert_sound, write_config
from tests.fakes.records import RUN
from tests.fakes.runs import buffer_of, rows, save_qwen2, small_config
from tests.replay.pages.serving import Served, page_addresses
from tests.replay.storage.writers import Writer, begin

GOALS = {
    "inspector_mib_per_minute": "<= 1",
    "trainer_mib_per_minute": "<= 1",
    "largest_log_mib": "<= 64",
    "append_p99_ms": "<= 1000",
}
PER_MINUTE = 45
"""Iterations: rewards of `Moody` take time, not work."""
MOODY = f"{ENVIRONMENTS / 'parity.py'}:Moody"
MIB = 2**20


@dataclass
class Visitor:
    """Asks for one page after another, in an order of its own."""

    served: Served
    database: Location
    stop: threading.Event = field(default_factory=threading.Event)
    statuses: set[int] = field(default_factory=set)
    seconds: list[float] = field(default_factory=list)

    def warm_up(self) -> None:
        """Every page, by as many at once as the server has threads, and more."""
        with ThreadPoolExecutor(12) as pool:
            assert {response.status for response in pool.map(self.served.ask, 4 * self.targets())} == {200}

    def visit(self) -> None:
        chance = random.Random(0)
        while not self.stop.is_set():
            targets = self.targets()
            for target in chance.sample(targets, len(targets)):
                if self.stop.is_set():
                    return
                began = time.monotonic()
                status = self.served.ask(target).status
                self.seconds.append(time.monotonic() - began)
                self.statuses.add(status)
                time.sleep(0.02)

    def targets(self) -> list[str]:
        """Of whatever is newest in the trainer's own run."""
        newest = f"where run <> '{RUN}' order by iteration desc, slot limit 2"
        query = f"select id, run, task from trajectories {newest}"  # noqa: S608
        (first, run, its_task), (second, _, _) = rows(self.database, query)
        filtered = [address("buffer", where=["reward>=0.5", "num_turns<3"]), address("buffer", sort="reward")]
        return [*page_addresses((run, RUN), its_task, [first, second]), *filtered]


@contextmanager
def inspected(run: Path) -> Iterator[tuple[psutil.Process, Served]]:
    """`agentloop inspect` in a process of its own."""
    with Program("inspect", run, "--no-browser", "--port", "0") as inspector:
        inspector.says(" at http")
        (port,) = re.findall(r" at http\S+:(\d+)", inspector.output)
        yield psutil.Process(inspector.id), Served(int(port))
        assert not inspector.ended, inspector.output
        inspector.send(signal.SIGINT)
        inspector.wait()
    print(inspector.output)
    assert "Traceback" not in inspector.output


def wal_bytes(database: Location) -> int:
    """The largest the log has been is its file's size: it is written over and not made shorter."""
    log = Path(f"{database}-wal")
    return log.stat().st_size if isinstance(database, Path) and log.exists() else 0


def growth(samples: list[tuple[float, float]]) -> float:
    """MiB per minute by the line of least squares through (minutes, MiB)."""
    return statistics.linear_regression(*zip(*samples, strict=True)).slope


def measure(folder: Path, *, minutes: float, database: str | None = None) -> dict[str, float]:
    """Its figures; AssertionError where a page, a writer or the trainer met with an error."""
    iterations = math.ceil(PER_MINUTE * minutes)
    config = small_config(
        folder / "runs",
        save_qwen2(folder / "model"),
        run={"iterations": iterations},
        environment={"name": MOODY},
        evaluation={"every": 50},
        checkpoint={"every": 20, "keep_policies": "none"},
        replay={"database": database},
    )
    training = Training(write_config(config, folder / "small.yaml"), mood="slow")
    training.says("iteration 2/")
    run = folder / "runs" / "small-001"
    location = buffer_of(run)
    largest_log = 0
    begin(location)
    writers = [Writer(location, number, 1_000_000, pause_s=1.0) for number in range(8)]
    with ExitStack() as stack, inspected(run) as (process, served):
        for writer in writers:
            stack.callback(writer.stop)
        visitor = Visitor(served, location)
        visitor.warm_up()
        watched = {"inspector": process, "trainer": psutil.Process(training.id)}
        resident: dict[str, list[tuple[float, float]]] = {name: [] for name in watched}
        thread = threading.Thread(target=visitor.visit)
        thread.start()
        stack.callback(visitor.stop.set)
        began = time.monotonic()
        while not training.ended:
            largest_log = max(largest_log, wal_bytes(location))
            for name, each in watched.items():
                with suppress(psutil.NoSuchProcess):
                    if size := each.memory_info().rss:  # one that has ended and is still to be waited for has none
                        resident[name].append(((time.monotonic() - began) / 60, size / MIB))
            time.sleep(0.3)
        assert thread.is_alive(), "the visitor met with an error"
        visitor.stop.set()
        thread.join()
    assert training.wait() == 0, training.errors
    assert_sound(run, iterations=iterations)
    assert all(writer.acknowledged() for writer in writers)
    appends = sorted(second for writer in writers for second in writer.seconds)
    assert max(visitor.statuses) < 400
    return {
        "pages": len(visitor.seconds),
        "page_p50_ms": 1000 * statistics.median(visitor.seconds),
        **{f"{name}_mib_per_minute": growth(samples) for name, samples in resident.items()},
        "largest_log_mib": largest_log / MIB,
        "append_p99_ms": 1000 * appends[len(appends) * 99 // 100],
    }


def main(arguments: Sequence[str] = ()) -> dict[str, float]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inspected_run", description=__doc__)
    parser.add_argument("--minutes", type=float, help="how long, about; left out: nothing is measured")
    parser.add_argument("--database", help="URL of an empty database of a server; left out: a file")
    given = parser.parse_args(arguments)
    if given.minutes is None:
        print("inspected_run measures for as long as --minutes says, got none.")
        return {}
    with tempfile.TemporaryDirectory() as folder:
        return measure(Path(folder), minutes=given.minutes, database=given.database)


if __name__ == "__main__":
    for name, value in main(sys.argv[1:]).items():
        print(f"{name} {value:.2f}")
