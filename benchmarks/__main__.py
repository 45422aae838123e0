"""Every benchmark of this folder in one table: `make bench`, or `python -m benchmarks --json` for programs.

A benchmark is a module with `measure() -> dict[str, float]`; its figures compare two ways of one run, so that a noisy
machine disturbs both alike.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pkgutil
import platform
import sqlite3
import sys
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
        print("\n".join(f"{name:<9} {value}" for name, value in found.items()))
    figures: dict[str, dict[str, float]] = {}
    for name in names():
        print(f"{name} ...", file=sys.stderr)
        figures[name] = import_module(f"benchmarks.{name}").measure()
    if as_json:
        print(json.dumps({"environment": found, "benchmarks": figures}, indent=1))
        return
    rows = [(name, figure, f"{value:,.2f}") for name, each in figures.items() for figure, value in each.items()]
    titles = ("benchmark", "figure", "value")
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    print()
    for name, figure, value in [titles, *rows]:
        print(f"{name:<{widths[0]}}  {figure:<{widths[1]}}  {value:>{widths[2]}}")


if __name__ == "__main__":
    main()
