"""Every benchmark of this folder: `make bench`, or `python -m benchmarks --json` for programs.

`python -m benchmarks store` runs those whose names begin so. A benchmark is a module whose `main()` returns its figures
by name, or none where the machine lacks what it needs; `GOALS` has those that are promised (`<= 3.5`). It compares ways
in alternating rounds of one run, so that a noisy machine disturbs all alike.
"""

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

import psutil  # type: ignore[import-untyped]
import torch

import benchmarks


def environment() -> dict[str, str]:
    """What the figures depend on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        **gpu,
        "hardware": f"{_processor()}, {cores} cores, {psutil.virtual_memory().total / 1024**3:.0f} GiB",
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


def names(prefix: str = "") -> list[str]:
    found = [module.name for module in pkgutil.iter_modules(benchmarks.__path__)]
    return sorted(name for name in found if name.startswith(prefix) and not name.startswith("_"))


def main() -> None:
    if sys.argv[1:2] == ["gpu"]:  # it has options of its own
        sys.exit(import_module("benchmarks.gpu").command(sys.argv[2:]))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run benchmarks.")
    parser.add_argument("prefix", nargs="?", default="", help="of the names of those to run; all without it")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    arguments = parser.parse_args()
    as_json: bool = arguments.json
    chosen = names(arguments.prefix)
    if not chosen:
        parser.error(f"prefix must begin the name of one of {', '.join(names())}, got {arguments.prefix!r}.")
    found = environment()
    if not as_json:
        print("\n".join(f"{name:<9} {value}" for name, value in found.items()), flush=True)
    figures: dict[str, dict[str, float]] = {}
    for name in chosen:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the tables, or the JSON
            figures[name] = import_module(f"benchmarks.{name}").main()
        if not as_json:
            print(table(name, figures[name]), flush=True)
    if as_json:
        print(json.dumps({"environment": found, "benchmarks": figures}, indent=1))


def verdict(name: str, value: float, goals: Mapping[str, str]) -> str:
    """What to print after a figure; nothing where there is no goal."""
    sign, _, bound = goals.get(name, "").partition(" ")
    met = sign != "" and (value <= float(bound) if sign == "<=" else value >= float(bound))
    return f"goal {goals[name]:<8} {'PASS' if met else 'miss'}" if name in goals else ""


def table(name: str, figures: Mapping[str, float]) -> str:
    """One line per figure under what the benchmark compares, with its goal and whether it is met."""
    module, width = import_module(f"benchmarks.{name}"), max(map(len, figures), default=0)
    goals = getattr(module, "GOALS", {})
    lines = [
        f"  {key:<{width}}  {value:12,.2f}  {verdict(key, value, goals)}".rstrip() for key, value in figures.items()
    ]
    head = f"\n{name}: {(module.__doc__ or '').splitlines()[0]}"
    return "\n".join([head, *(lines or ["  left out: this machine lacks what it needs, which is told above"])])


if __name__ == "__main__":
    main()
