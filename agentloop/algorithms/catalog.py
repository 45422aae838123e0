"""Finds the algorithms and objectives that the modules of `baselines/` and `objectives/` declare."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeVar

from agentloop.algorithms import baselines, objectives
from agentloop.algorithms.declarations import Algorithm, Objective

Record = TypeVar("Record", Algorithm, Objective)


def _declared(kind: type[Record]) -> dict[str, Record]:
    """Find the records of a kind, by name. The modules must not import torch, because workers read the records."""
    found = {}
    for package in (baselines, objectives):
        for module in iter_modules(package.__path__):
            values = vars(import_module(f"{package.__name__}.{module.name}")).values()
            found.update({value.name: value for value in values if isinstance(value, kind)})
    return dict(sorted(found.items()))


ALGORITHMS: Mapping[str, Algorithm] = _declared(Algorithm)
"""Algorithms by the value of `algorithm`."""
OBJECTIVES: Mapping[str, Objective] = _declared(Objective)
"""Objectives by the value of `loss.<stream>.objective`."""


def algorithms_where(condition: Callable[[Algorithm], bool]) -> list[str]:
    """Find the names of the algorithms that meet a condition."""
    return [name for name, algorithm in ALGORITHMS.items() if condition(algorithm)]
