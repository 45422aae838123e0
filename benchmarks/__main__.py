"""Every benchmark of this folder in one table: `make bench`, or `python -m benchmarks --json` for programs.

A benchmark is a module whose `main()` prints what it measured and returns its figures by name. It compares two ways in
alternating rounds of one run, so that a noisy machine disturbs both alike.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import pkgutil
import platform
import sqlite3
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import torch

import benchmarks


def environment() -> dict[str, str]:
    """What the figures depend on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "hardware": f"{_processor()}, {cores} cores, {_memory()}",
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": f"{torch.__version__}, 1 thread",
        "sqlite": sqlite3.sqlite_version,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1024**3:.0f} GiB"
    except (ValueError, OSError):  # not told by this system
        return "memory unknown"


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name != "__main__")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run every benchmark.")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    as_json: bool = parser.parse_args().json
    found = environment()
    if not as_json:
        print("\n".join(f"{name:<9} {value}" for name, value in found.items()), flush=True)
    figures: dict[str, dict[str, float]] = {}
    for name in names():
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the table, or the JSON
            figures[name] = import_module(f"benchmarks.{name}").main()
    print(json.dumps({"environment": found, "benchmarks": figures}, indent=1) if as_json else table(figures))


def table(figures: Mapping[str, Mapping[str, float]]) -> str:
    """One line per figure under what its benchmark compares."""
    width = max(len(figure) for each in figures.values() for figure in each)
    lines: list[str] = []
    for name, each in figures.items():
        lines += ["", f"{name}: {(import_module(f'benchmarks.{name}').__doc__ or '').splitlines()[0]}"]
        lines += [f"  {figure:<{width}}  {value:10,.2f}" for figure, value in each.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
