"""The pages of a run's tools and of its cost."""

import math

from starlette.requests import Request

from replay.open_buffer import OpenBuffer
from replay.pages.addresses import BadQuery, read_parameter, read_path_part
from replay.pages.page import Page
from replay.pages.panels import COLOURS, COST, TOOLS, plain_groups, question_panels
from replay.questions import QueryResult, metric_series
from replay.questions.cost import cost
from replay.questions.outliers import duplicates
from replay.questions.tools import tools

_READ = 1_000
"""Most episodes whose messages the page of tools reads."""
_SHOWN = 100
"""Most tools that are listed, those with most calls."""
_COMPARED = 4_000
"""Most episodes of a run whose tokens the page of the cost compares."""
_MEMORY = ("tools/repeated", "tools/replayed")


def show_tools(source: OpenBuffer, request: Request) -> QueryResult:
    run = source.store.run(read_path_part(request, "run"))
    found = tools(source.store, run.id, most=_READ)
    most_called = {tool["name"] for tool in found["tools"][:COLOURS]}
    for line in found["iterations"]:
        line["using"] = {name: share for name, share in line["using"].items() if name in most_called}
    logged = metric_series(source.store, run.id, names=_MEMORY, merged=found["merged"])
    panels = question_panels(TOOLS, found["iterations"], logged)
    return {**found, "name": run.name, "most": _SHOWN, **plain_groups({"": panels}, merged=found["merged"])}


def show_cost(source: OpenBuffer, request: Request) -> QueryResult:
    run = source.store.run(read_path_part(request, "run"))
    prices = {name: _read_price(request, name) for name in ("price_hour", "price_million")}
    found = cost(source.store, run.id, **prices)
    panels = question_panels(COST, found["iterations"], {})
    return {
        **found,
        "name": run.name,
        "prices": prices,
        "equal": duplicates(source.store, run.id) if found["total"]["episodes"] <= _COMPARED else None,
        **plain_groups({"": panels}, merged=found["merged"]),
    }


def _read_price(request: Request, name: str) -> float | None:
    given = read_parameter(request, name)
    try:
        price = None if given is None else float(given)
    except ValueError:
        price = math.nan
    if price is not None and not 0 <= price < math.inf:
        raise BadQuery(f"{name} must be a number from 0, got {given!r}.")
    return price


TOOLS_PAGE = Page("/runs/{run}/tools", "tools.html", show_tools, tab="run")
COST_PAGE = Page("/runs/{run}/cost", "cost.html", show_cost, tab="run")
