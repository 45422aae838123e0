"""A session of 4,000 requests, of the time of one of 1,000: stored and read as a row, and request by request.

Seconds of CPU, and what garbage there was is collected between two of them: a collection looks at all that a process
holds. Four times the requests take a little less than four times as long, for a transaction has a price of its own.
"""

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from context.authors import LLM, USER
from context.messages import Message
from context.tokens.session_nodes import Fork, Node, Place, Status
from replay import ReplayStore
from replay.storage.sessions import OpenSession
from tests.fakes.records import RUN, new_store, put, session_row, tokens

GOALS = {"row_growth": "<= 4", "under_way_growth": "<= 4.4"}
REQUESTS = (1000, 4000)


def session(requests: int) -> tuple[Node, ...]:
    """Each goes on from the reply to the one before."""
    own = tokens([5, 6, 7], [USER, LLM, LLM])
    said = (Message("user", "q"), Message("assistant", "a", author=LLM))
    first = Place(None, 0, 0, "", Fork.NEW)
    places = [first, *(Place(n - 1, 3 * n, 2 * n, "", None) for n in range(1, requests))]
    return tuple(Node(n, place, own, 2, said, Status.TRAINED) for n, place in enumerate(places))


def cpu_seconds(work: Callable[[], object]) -> float:
    gc.collect()
    began = time.process_time()
    work()
    return time.process_time() - began


def as_a_row(store: ReplayStore, id: str, nodes: tuple[Node, ...]) -> float:
    row = session_row(id, nodes=nodes, group=id)
    return cpu_seconds(lambda: put(store, row, size=1)) + cpu_seconds(lambda: store.read([id]))


def under_way(store: ReplayStore, id: str, nodes: tuple[Node, ...]) -> float:
    store.sessions.open(OpenSession(id, RUN, "2026-01-01"))

    def add() -> None:
        for node in nodes:
            store.sessions.add([(id, node)])

    return cpu_seconds(add) + cpu_seconds(lambda: store.sessions.nodes(id))


def measure(folder: Path, *, requests: tuple[int, int] = REQUESTS, rounds: int) -> dict[str, float]:
    """Medians over rounds: milliseconds of each length, and their ratio within a round."""
    store, found = new_store(folder / "replay.sqlite"), dict[str, float]()
    short, long = map(session, requests)
    for name, way in (("row", as_a_row), ("under_way", under_way)):
        pairs = [
            (way(store, f"{name}-short-{at}", short), way(store, f"{name}-long-{at}", long)) for at in range(rounds)
        ]
        for count, times in zip(requests, zip(*pairs, strict=True), strict=True):
            found[f"{name}_{count}_ms"] = 1e3 * statistics.median(times)
        found[f"{name}_growth"] = statistics.median(more / less for less, more in pairs)
    store.close()
    return found


def main(rounds: int = 15) -> dict[str, float]:
    print(f"sessions of {REQUESTS[0]:,} and {REQUESTS[1]:,} requests, {rounds} paired rounds, medians of CPU time")
    with tempfile.TemporaryDirectory() as folder:
        return measure(Path(folder), rounds=rounds)
