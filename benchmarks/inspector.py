"""The inspector over a buffer of 100,000 trajectories: how long each page takes, and what the server needs.

The real server in a process of its own, asked over one connection that is kept open. Its time for a request is what its
process spent on a processor meanwhile, so that other work on the machine is not counted.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import numpy as np

from benchmarks._buffer import TASKS, fill
from benchmarks._rows import RUN
from replay import ReplayStore
from replay.questions import Query, Sort, page
from tests.browser import executable
from tests.fakes.processes import Program

SIZE = 100_000
GOALS = {
    "list_median_ms": "<= 50",
    "list_p95_ms": "<= 50",
    "slowest_page_p95_ms": "<= 300",
    "server_peak_mb": "<= 150",
    "first_paint_cold_ms": "<= 500",
    "first_paint_warm_ms": "<= 500",
}
_FILTERS = ("", "success", "reward > 0.2 and reward < 0.9", "staleness < 100", "uses >= 3")
_FIRST_PAINT = """() => new Promise((resolve) => new PerformanceObserver((list) => {
  for (const paint of list.getEntriesByName("first-contentful-paint")) resolve(paint.startTime);
}).observe({type: "paint", buffered: true}))"""
_SEARCHES = ("'import' in text", "'nowhere at all' in text")


def lists(store: ReplayStore) -> Iterator[str]:
    """Every sort either way, with every filter: the first page, and the one after it."""
    for sort in Sort:
        for ascending in (False, True):
            for where in _FILTERS:
                asked = [("run", RUN), ("sort", sort.value), ("order", "asc" if ascending else "desc")]
                asked += [("where", where)] if where else []
                yield "/buffer?" + urlencode(asked)
                after = page(store, Query(RUN, (where,) if where else (), sort, ascending))["after"]
                if after:
                    yield "/buffer?" + urlencode([*asked, ("after", after)])


def pages(store: ReplayStore) -> dict[str, str]:
    """One address of every kind, by its name."""
    (newest,) = page(store, Query(RUN, ("uses >= 1",)), limit=1)["rows"]
    return {
        "runs": "/",
        "run": f"/runs/{RUN}",
        "iteration": f"/runs/{RUN}/iterations/{newest['iteration']}",
        "buffer_overview": f"/buffer/overview?run={RUN}",
        "filtered_overview": "/buffer/overview?" + urlencode({"run": RUN, "where": "success"}),
        "trajectory": f"/trajectories/{newest['id']}",
        "tokens": f"/trajectories/{newest['id']}?view=tokens",
        "task": f"/tasks/{TASKS[0].hash}",
        "uses": f"/trajectories/{newest['id']}?view=updates",
        "tasks": f"/tasks?run={RUN}",
        "outcomes": f"/outcomes?run={RUN}",
        "replayed": f"/runs/{RUN}/replayed",
        "after_replay": f"/runs/{RUN}/after-replay",
        "held_out": f"/runs/{RUN}/held-out",
        "held_out_slices": f"/slices?run={RUN}&of=held-out",
        "compared_runs": "/?" + urlencode({"all": 1, "show": [RUN, f"{RUN}-2"]}, doseq=True),
        "differences": "/differences?" + urlencode({"show": [RUN, f"{RUN}-2"]}, doseq=True),
        "compared_tasks": "/compared-tasks?" + urlencode({"show": [RUN, f"{RUN}-2"]}, doseq=True),
        "compared_over_tokens": "/?" + urlencode({"over": "generated tokens", "show": [RUN, f"{RUN}-2"]}, doseq=True),
        "slices": f"/slices?run={RUN}&by=hops",
        "mixing": f"/mixing?run={RUN}",
        "tools": f"/runs/{RUN}/tools",
        "cost": f"/runs/{RUN}/cost?price_hour=2.5",
        **{f"search_{n}": "/buffer?" + urlencode({"run": RUN, "where": text}) for n, text in enumerate(_SEARCHES)},
    }


def measure(address: str, process: int, addresses: Mapping[str, str], *, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of the server for every request by name; only a page will do as answer."""
    times: dict[str, list[float]] = {name: [] for name in addresses}
    with closing(HTTPConnection(urlsplit(address).netloc, timeout=60)) as connection:
        for turn in range(rounds + 1):
            for name, path in addresses.items():
                before = processor_seconds(process)
                connection.request("GET", path)
                response = connection.getresponse()
                body = response.read()
                taken = 1e3 * (processor_seconds(process) - before)
                if response.status != 200:
                    raise RuntimeError(f"{path} must be answered, got {response.status}: {body[:300]!r}")
                if turn:  # the first time, templates are compiled
                    times[name].append(taken)
    return times


def first_paints(address: str, *, rounds: int) -> dict[str, float]:
    """Medians of what a browser says of its first contentful paint: with nothing kept of an earlier page, and with all
    that the server lets it keep. Wall time, so of a machine that does nothing else. Nothing where there is no browser.
    """
    if not executable.found():
        return {}
    paints: dict[str, list[float]] = {"first_paint_cold_ms": [], "first_paint_warm_ms": []}
    with executable.launched() as browser:
        for _ in range(rounds):
            with closing(browser.new_context(viewport={"width": 1280, "height": 800})) as context:
                page = context.new_page()
                for times in paints.values():
                    page.goto(address)
                    times.append(page.evaluate(_FIRST_PAINT))
    return {name: statistics.median(times) for name, times in paints.items()}


def processor_seconds(process: int) -> float:
    """Of all its threads, ended ones included: Linux's clock of another process, see clock_getcpuclockid(3)."""
    return time.clock_gettime(~process << 3 | 2)


def peak_mb(process: int) -> float:
    """The most memory it ever had resident."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def p95(times: Sequence[float]) -> float:
    return float(np.quantile(times, 0.95))


def main(rounds: int = 20, size: int = SIZE) -> dict[str, float]:
    print(f"the inspector over {size:,} trajectories, {rounds} rounds of every page, medians", flush=True)
    if sys.platform != "linux":
        print("  left out: other systems don't tell the time and the memory of another process")
        return {}
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "replay.sqlite"
        with closing(ReplayStore.create(database)) as store:
            fill(store, size, np.random.default_rng(0))
            kinds, listed = pages(store), {path: path for path in lists(store)}
        with Program("inspect", database, "--no-browser", "--port", "0") as server:
            server.says(" at http")
            address, process = server.output.split(" at ")[-1].split()[0], server.id
            of_lists = measure(address, process, listed, rounds=max(1, rounds // 5))
            by_page = measure(address, process, kinds, rounds=rounds)
            taken = [each for times in of_lists.values() for each in times]
            found = {"list_median_ms": statistics.median(taken), "list_p95_ms": p95(taken)}
            found |= {f"{name}_p95_ms": p95(times) for name, times in by_page.items()}
            found["slowest_page_p95_ms"] = max(found[f"{name}_p95_ms"] for name in by_page)
            found["slowest_page_median_ms"] = max(map(statistics.median, by_page.values()))
            found["server_peak_mb"] = peak_mb(process)
            found |= first_paints(address + kinds["run"].lstrip("/"), rounds=max(1, rounds // 2))
    return found
