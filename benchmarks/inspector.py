"""The inspector over a buffer of 100,000 trajectories: how long each page takes, and what the server needs.

The real server in a process of its own, asked over one connection that is kept open. Its time for a request is what its
process spent on a processor meanwhile, so that other work on the machine is not counted; `wall` is until the last byte
was there. With a browser and playwright also how soon it shows something (its first contentful paint, from an empty
cache), and how soon a trajectory of 500 turns of 200 tokens can be read: its conversation, 60 turns of which are on a
page, and its tokens, which come 2,048 at a time.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

import numpy as np

from benchmarks._buffer import LONG, TASKS, add_long, add_workers, fill
from benchmarks._goals import show
from benchmarks._rows import RUN
from replay import ReplayStore
from replay.questions import Query, Sort, page

SIZE = 100_000
GOALS = {
    "list_median_ms": "<= 50",
    "list_p95_ms": "<= 50",
    "slowest_page_p95_ms": "<= 300",
    "slowest_cluster_p95_ms": "<= 700",
    "first_render_ms": "<= 1000",
    "long_trajectory_render_ms": "<= 1000",
    "long_tokens_render_ms": "<= 1000",
    "server_peak_mb": "<= 150",
}
_FREE = 2 * 1024**3
_FILTERS = (
    (),
    ("success",),
    ("reward > 0.2 and reward < 0.9", "state == 'eligible'"),
    ("staleness < 100",),
    ("uses >= 3",),
)
_SEARCHES = ("'import' in text", "'nowhere at all' in text", "tool == 'search'")
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_SERVE = "from agentloop.cli.main import main; main()"


def lists(store: ReplayStore) -> Iterator[str]:
    """Every sort either way, with every filter: the first page, and the one after it."""
    for sort in Sort:
        for ascending in (False, True):
            for where in _FILTERS:
                asked = [("run", RUN), ("sort", sort.value), ("order", "asc" if ascending else "desc")]
                asked += [("where", condition) for condition in where]
                yield "/buffer?" + urlencode(asked)
                after = page(store, Query(RUN, where, sort, ascending))["after"]
                if after:
                    yield "/buffer?" + urlencode([*asked, ("after", after)])


def pages(store: ReplayStore) -> dict[str, str]:
    """One address of every kind, by its name."""
    newest, other = page(store, Query(RUN, ("uses >= 1",)), limit=2)["rows"]
    first, second = newest["id"], other["id"]
    run = quote(RUN)
    found = {
        "runs": "/",
        "run": f"/runs/{run}",
        "cluster": f"/runs/{run}/cluster",
        "iteration": f"/runs/{run}/iterations/{newest['iteration']}",
        "buffer": f"/buffer?run={run}",
        "buffer_overview": f"/buffer/overview?run={run}",
        "filtered_overview": "/buffer/overview?" + urlencode({"run": RUN, "where": "success"}),
        "trajectory": f"/trajectories/{first}",
        "long_trajectory": f"/trajectories/{LONG}",
        "long_tokens": f"/trajectories/{LONG}?view=tokens",
        "stretch_of_tokens": f"/trajectories/{LONG}/tokens.json",
        "task": f"/tasks/{TASKS[0].hash}",
        "compared_trajectories": "/compare?" + urlencode({"id": [first, second]}, doseq=True),
        "compared_runs": "/?" + urlencode({"all": 1, "show": [RUN, f"{RUN}-2"]}, doseq=True),
        "mixing": f"/mixing?run={run}",
    }
    found |= {
        f"search_{at}": "/buffer?" + urlencode({"run": RUN, "where": text}) for at, text in enumerate(_SEARCHES, 1)
    }
    return found


@contextmanager
def server(database: Path) -> Iterator[tuple[str, int]]:
    """Its address and process id."""
    command = [sys.executable, "-c", _SERVE, "inspect", str(database), "--no-browser", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if " at http" not in line:
                raise RuntimeError(f"the inspector must tell its address, got {line!r}")
            yield line.split(" at ")[-1].strip(), process.pid
        finally:
            process.terminate()


Times = dict[str, list[tuple[float, float]]]
"""Milliseconds of the server, and until the last byte, of every request by name."""


def measure(address: str, process: int, addresses: Mapping[str, str], *, rounds: int) -> Times:
    """Raises where an answer is not 200, or leads elsewhere."""
    connection = HTTPConnection(urlsplit(address).netloc, timeout=60)
    times: Times = {name: [] for name in addresses}
    for turn in range(rounds + 1):
        for name, path in addresses.items():
            before, began = processor_seconds(process), time.perf_counter()
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
            taken = (processor_seconds(process) - before, time.perf_counter() - began)
            if response.status not in (200, 303):
                raise RuntimeError(f"{path} must be answered, got {response.status}: {body[:300]!r}")
            # The first time, templates are compiled.
            if turn:
                times[name].append((1e3 * taken[0], 1e3 * taken[1]))
    connection.close()
    return times


def processor_seconds(process: int) -> float:
    """Of all its threads, ended ones included: Linux's clock of another process, see clock_getcpuclockid(3)."""
    return time.clock_gettime(~process << 3 | 2)


def peak_mb(process: int) -> float:
    """The most memory it ever had resident."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def renders(address: str, paths: Mapping[str, str], *, rounds: int) -> dict[str, float]:
    """Milliseconds to the first contentful paint of each, medians; and until the long trajectory can be read."""
    executable = next(filter(None, map(shutil.which, _BROWSERS)), None)
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        executable = None
    if executable is None:
        print("  renders left out: they need playwright and chromium (make setup-browser)", flush=True)
        return {}
    paint = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    readable = {
        "long_trajectory": "() => performance.getEntriesByType('navigation')[0].loadEventEnd",
        "long_tokens": "() => document.querySelector('.t') && performance.now()",
    }
    found: dict[str, list[float]] = {name: [] for name in paths}
    read: dict[str, list[float]] = {name: [] for name in readable}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        for _ in range(rounds):
            for name, path in paths.items():
                tab = browser.new_page()
                tab.goto(address.rstrip("/") + path, wait_until="load")
                tab.wait_for_function(paint)
                found[name].append(float(tab.evaluate(paint)))
                if name in readable:
                    read[name].append(float(tab.wait_for_function(readable[name]).json_value()))
                tab.close()
        browser.close()
    medians = {f"render_{name}_ms": statistics.median(times) for name, times in found.items()}
    whole = {
        f"{name}_render_ms": max(statistics.median(times), medians[f"render_{name}_ms"]) for name, times in read.items()
    }
    return {**medians, "first_render_ms": max(medians.values()), **whole}


def p95(times: Sequence[float]) -> float:
    return float(np.quantile(times, 0.95))


def figures(database: Path, *, rounds: int) -> dict[str, float]:
    store = ReplayStore.open(database, read_only=True)
    kinds = pages(store)
    listed = {path: path for path in lists(store)}
    store.close()
    with server(database) as (address, process):
        listings = measure(address, process, listed, rounds=max(1, rounds // 5))
        of_lists = [each for times in listings.values() for each in times]
        by_page = measure(address, process, kinds, rounds=rounds)
        mine, wall = zip(*of_lists, strict=True)
        found = {"list_median_ms": statistics.median(mine), "list_p95_ms": p95(mine), "list_wall_p95_ms": p95(wall)}
        for name, times in by_page.items():
            mine, wall = zip(*times, strict=True)
            found |= {f"{name}_p95_ms": p95(mine), f"{name}_wall_ms": statistics.median(wall)}
        # Of a cluster every ticket is looked up, so that one that is lost shows; its page asks the less often for that.
        of_cluster = {name for name in by_page if name.startswith("cluster")}
        found["slowest_cluster_p95_ms"] = max(found[f"{name}_p95_ms"] for name in of_cluster)
        found["slowest_page_p95_ms"] = max(found[f"{name}_p95_ms"] for name in by_page.keys() - of_cluster)
        found["server_peak_mb"] = peak_mb(process)
        shown = {
            name: path
            for name, path in kinds.items()
            if not name.startswith(("search", "stretch")) and "overview" not in name
        }
        return found | renders(address, shown, rounds=max(1, rounds // 5))


def main(rounds: int = 20, size: int = SIZE) -> dict[str, float]:
    print(f"the inspector over {size:,} trajectories, {rounds} rounds of every page, medians", flush=True)
    if sys.platform != "linux":
        print("  left out: other systems don't tell the time and the memory of another process")
        return {}
    places = ("/dev/shm", tempfile.gettempdir())
    roomy = [place for place in places if Path(place).is_dir() and shutil.disk_usage(place).free >= _FREE]
    if not roomy:
        print(f"  left out: it needs {_FREE / 1024**3:.0f} GiB free in one of {', '.join(places)}")
        return {}
    with tempfile.TemporaryDirectory(dir=roomy[0]) as folder:
        store = ReplayStore.create(Path(folder) / "replay.sqlite")
        fill(store, size, np.random.default_rng(0))
        add_long(store)
        add_workers(store)
        store.close()
        found = figures(Path(folder) / "replay.sqlite", rounds=rounds)
    show(found, GOALS)
    return found


if __name__ == "__main__":
    main()
