"""The buffer as a list: filtered, sorted, page by page."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from markupsafe import Markup

from replay import queries
from replay.inspector.drawings.bars import Bar, bars
from replay.inspector.server.page_views import Mistake, Page, Redirect, run_of
from replay.inspector.server.query_string import QueryString, address
from replay.inspector.text.reading import typed
from replay.queries import Query, QueryResult, Sort
from replay.queries.filters import WrongFilter, conditions
from replay.queries.open_buffer import OpenBuffer

_ROWS = 50
_KEPT = ("run", "sort", "order", "limit")
_TITLES = {
    "reward": "Reward",
    "tokens": "Length in tokens",
    "turns": "Turns",
    "staleness": "Staleness",
    "uses": "Uses",
    "group_success": "Group success",
}


class Order(StrEnum):
    desc = "desc"
    asc = "asc"


def answer(source: OpenBuffer, query: QueryString) -> QueryResult:
    """A page of rows with the cursors of the pages around it."""
    _complete(query)
    asked = _query(source, query)
    limit = query.whole("limit", _ROWS, least=1, most=500)
    found = queries.page(source.store, asked, limit=limit, after=query.text("after"), before=query.text("before"))
    return {**_plain(asked), **found}


def shows(source: OpenBuffer, query: QueryString, found: QueryResult) -> dict[str, Any]:
    """Addresses of what is one click away."""
    kept, filters = _kept(query), found["filters"]
    base = {**kept, "where": filters}

    def without(condition: str) -> str:
        return address("buffer", **kept, where=[other for other in filters if other != condition])

    def sorted_by(sort: Sort) -> str:
        turned = found["sort"] == sort and not found["ascending"]
        return address("buffer", **{**base, "sort": sort, "order": Order.asc if turned else None})

    return {
        "chips": [(each, without(each)) for each in filters],
        "sorts": {sort: sorted_by(sort) for sort in Sort},
        "kept": list(kept.items()),
        "command": _command(source, found),
        "overview": address("buffer", "overview", **base),
        "first_page": address("buffer", **base) if query.text("after") or query.text("before") else None,
        "next_page": address("buffer", **base, after=found["after"]) if found["after"] else None,
        "previous_page": address("buffer", **base, before=found["before"]) if found["before"] else None,
    }


def overview(source: OpenBuffer, query: QueryString) -> QueryResult:
    """How the rows that the conditions hold for are spread."""
    asked = _query(source, query)
    return {**_plain(asked), **queries.distributions(source.store, asked)}


def overview_shows(source: OpenBuffer, query: QueryString, found: QueryResult) -> dict[str, Any]:
    """Bars and choices that add their condition, or take it away."""
    kept, chosen = _kept(query), found["filters"]

    def toggled(condition: str) -> str:
        rest = [other for other in chosen if other != condition]
        return address("buffer", **kept, where=rest if condition in chosen else [*chosen, condition])

    def drawn(name: str) -> Markup:
        shown = [
            Bar(_label(bar), bar["count"], toggled(bar["filter"]), selected=bar["filter"] in chosen)
            for bar in found["fields"][name]["bars"]
        ]
        return bars(shown, summary=f"{_TITLES[name]}: a bar filters by it", size=(200, 74))

    def choices(name: str, counts: dict[str, int]) -> list[dict[str, Any]]:
        filters = {text: f"{name} == {text!r}" for text in counts}
        return [
            {"label": text, "count": counts[text], "href": toggled(filter), "chosen": filter in chosen}
            for text, filter in filters.items()
        ]

    listed = address("buffer", **kept, where=chosen)
    if found["fields"] is None:
        return {"listed": listed, "spreads": [], "facets": []}
    return {
        "listed": listed,
        "spreads": [{"title": title, "drawn": drawn(name), **found["fields"][name]} for name, title in _TITLES.items()],
        "facets": [
            (name.replace("_", " "), choices(name, counts))
            for name, counts in found["choices"].items()
            if len(counts) > 1 or any(name in condition for condition in chosen)
        ],
    }


def understood(query: QueryString) -> tuple[QueryString, list[Mistake]]:
    """Without the conditions that can't be read, or are too many together with those before them."""
    kept: list[str] = []
    mistakes: list[Mistake] = []
    for text in query.texts("where"):
        try:
            conditions([*kept, text])
            kept.append(text)
        except WrongFilter as error:
            mistakes.append(Mistake(text, str(error)))
    rest = [pair for pair in query.items() if pair[0] not in ("where", "after", "before")]
    return QueryString([*rest, *(("where", text) for text in kept)]), mistakes


def _query(source: OpenBuffer, query: QueryString) -> Query:
    order = query.choice("order", Order.desc)
    return Query(run_of(source, query), query.texts("where"), query.choice("sort", Sort.iteration), order is Order.asc)


def _plain(query: Query) -> QueryResult:
    return {**vars(query), "filters": list(query.filters)}


def _label(bar: QueryResult) -> str:
    return f"{bar['low']:g}" if bar["low"] == bar["high"] else f"{bar['low']:g}\u2013{bar['high']:g}"


def _complete(query: QueryString) -> None:
    """What the form's short fields say becomes a condition of the address: there is one way to say it."""
    added = []
    if text := query.text("text"):
        added.append(f"{text!r} in text")
    if tool := query.text("tool"):
        added.append(f"tool == {tool!r}")
    if task := query.text("task"):
        added.append(f"task.startswith({task!r})")
    if added:
        whole = list(dict.fromkeys([*query.texts("where"), *added]))
        raise Redirect(address("buffer", **_kept(query), where=whole))


def _kept(query: QueryString) -> dict[str, str]:
    return {name: value for name, value in query.items() if name in _KEPT}


def _command(source: OpenBuffer, found: QueryResult) -> str:
    """The command that asks this query in a terminal."""
    words, run, filters = source.run_words, found["run"], list(found["filters"])
    if run != source.run and len(queries.run_names(source.store)) > 1:
        # A run's folder names its run alone; its database names all there are.
        words = words if source.run is None else [source.store.url]
        filters += [] if run is None else [f"run == {run!r}"]
    command = ["agentloop", "replay", "ls", *words, "--sort", str(found["sort"])]
    command += ["--ascending"] if found["ascending"] else []
    if filters:
        whole = filters[0] if len(filters) == 1 else " and ".join(f"({condition})" for condition in filters)
        command += ["--where", whole]
    return typed(command)


PAGE = Page("/buffer", "buffer.html", answer, tab="buffer", shows=shows, understood=understood)
OVERVIEW = Page("/buffer/overview", "overview.html", overview, tab="buffer", shows=overview_shows)
