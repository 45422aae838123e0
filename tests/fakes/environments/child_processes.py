"""A reward function and a sink that need processes, begun in the ways that AGENTLOOP_TEST_WAYS names.

Several ways have their turn once each, a single one has it at every call.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

KEPT: dict[str, ProcessPoolExecutor] = {}


def score(text: str) -> float:
    return float(len(text) % 2)


def score_slowly(text: str) -> float:
    time.sleep(0.2)
    return score(text)


def forked_pool(text: str) -> float:
    with get_context("fork").Pool(1) as pool:  # which it terminates
        return pool.apply(score, (text,))


def program(text: str) -> float:
    command = [sys.executable, "-I", "-S", "-c", f"import time; time.sleep(0.1); print({len(text)} % 2)"]
    return float(subprocess.run(command, check=True, capture_output=True).stdout)


def kept(method: str) -> Callable[[str], float]:
    def with_kept(text: str) -> float:
        if method not in KEPT:
            KEPT[method] = ProcessPoolExecutor(2, mp_context=get_context(method))
        return KEPT[method].submit(score_slowly, text).result()

    return with_kept


WAYS: dict[str, Callable[[str], float]] = {
    "fork pool": forked_pool,
    "kept fork executor": kept("fork"),
    "kept spawn executor": kept("spawn"),
    "kept forkserver": kept("forkserver"),
    "subprocess": program,
}
LEFT = [name for name in os.environ.get("AGENTLOOP_TEST_WAYS", "").split(",") if name]
REPEATED = LEFT[0] if len(LEFT) == 1 else None


def ask(text: str) -> float:
    name = LEFT.pop(0) if LEFT else REPEATED
    found = score(text) if name is None else WAYS[name](text)
    if not LEFT:
        Path(os.environ["AGENTLOOP_TEST_MARK"]).touch()
    return found


def judge(episode: Any) -> float:
    return ask(episode.answer)


class Sink:
    def __init__(self, folder: Path) -> None: ...

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        ask(str(iteration))

    def close(self) -> None: ...
