"""The buffer as a list: filtered, sorted, page by page."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from markupsafe import Markup

from replay import queries
from replay.inspector.drawings.bars import Bar, bars
from replay.inspector.server.page import Elsewhere, Page, run_of
from replay.inspector.server.query import Query, address
from replay.inspector.text.shell import typed
from replay.queries import Answer, Question, Sort
from replay.queries.open_buffer import Source

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


def answer(source: Source, query: Query) -> Answer:
    """A page of rows with the cursors of the pages around it."""
    _settle(query)
    question = _question(source, query)
    limit = query.whole("limit", _ROWS, least=1, most=500)
    found = queries.page(source.store, question, limit=limit, after=query.text("after"), before=query.text("before"))
    return {**_plain(question), **found}


def shows(source: Source, query: Query, found: Answer) -> dict[str, Any]:
    """Addresses of what is one click away."""
    kept = _kept(query)
    base = {**kept, "where": found["where"]}

    def sorted_by(sort: Sort) -> str:
        turned = found["sort"] == sort and not found["ascending"]
        return address("buffer", **{**base, "sort": sort, "order": Order.asc if turned else None})

    return {
        "chips": _chips(found["where"], kept),
        "sorts": {sort: sorted_by(sort) for sort in Sort},
        "kept": list(kept.items()),
        "command": _command(source, found),
        "overview": address("buffer", "overview", **base),
        "first_page": address("buffer", **base) if query.text("after") or query.text("before") else None,
        "next_page": address("buffer", **base, after=found["after"]) if found["after"] else None,
        "previous_page": address("buffer", **base, before=found["before"]) if found["before"] else None,
    }


def overview(source: Source, query: Query) -> Answer:
    """How the rows that the conditions hold for are spread."""
    question = _question(source, query)
    return {**_plain(question), **queries.distributions(source.store, question)}


def overview_shows(source: Source, query: Query, found: Answer) -> dict[str, Any]:
    """Bars and choices that add their condition, or take it away."""
    kept, conditions = _kept(query), found["where"]

    def toggled(condition: str) -> str:
        rest = [other for other in conditions if other != condition]
        return address("buffer", **kept, where=rest if condition in conditions else [*conditions, condition])

    def drawn(name: str) -> Markup:
        shown = [
            Bar(_label(bar), bar["count"], toggled(bar["where"]), selected=bar["where"] in conditions)
            for bar in found["fields"][name]["bars"]
        ]
        return bars(shown, summary=f"{_TITLES[name]}: a bar filters by it", size=(200, 74))

    def choices(name: str, counts: dict[str, int]) -> list[dict[str, Any]]:
        told = {text: f"{name} = {_quoted(text)}" for text in counts}
        return [
            {"label": text, "count": counts[text], "href": toggled(where), "chosen": where in conditions}
            for text, where in told.items()
        ]

    listed = address("buffer", **kept, where=conditions)
    if found["fields"] is None:
        return {"listed": listed, "spreads": [], "facets": []}
    return {
        "listed": listed,
        "spreads": [{"title": title, "drawn": drawn(name), **found["fields"][name]} for name, title in _TITLES.items()],
        "facets": [
            (name.replace("_", " "), choices(name, counts))
            for name, counts in found["choices"].items()
            if len(counts) > 1 or any(name in condition for condition in conditions)
        ],
    }


def _question(source: Source, query: Query) -> Question:
    order = query.choice("order", Order.desc)
    return Question(
        run_of(source, query), query.texts("where"), query.choice("sort", Sort.iteration), order is Order.asc
    )


def _plain(question: Question) -> Answer:
    return {**vars(question), "where": list(question.where)}


def _label(bar: Answer) -> str:
    return f"{bar['low']:g}" if bar["low"] == bar["high"] else f"{bar['low']:g}\u2013{bar['high']:g}"


def _chips(conditions: Sequence[str], kept: dict[str, str]) -> list[tuple[str, str]]:
    """Each condition with the address without it."""
    return [
        (condition, address("buffer", **kept, where=[other for other in conditions if other != condition]))
        for condition in conditions
    ]


def _settle(query: Query) -> None:
    """What the form's short fields say becomes a condition of the address: there is one way to say it."""
    said = []
    if text := query.text("text"):
        said.append(f"text contains {_quoted(text)}")
    if tool := query.text("tool"):
        said.append(f"tool = {_quoted(tool)}")
    if task := query.text("task"):
        begins = task.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
        said.append(f"task like {_quoted(begins)}")
    if said:
        conditions = list(dict.fromkeys([*query.texts("where"), *said]))
        raise Elsewhere(address("buffer", **_kept(query), where=conditions))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _kept(query: Query) -> dict[str, str]:
    return {name: value for name, value in query.items() if name in _KEPT}


def _command(source: Source, found: Answer) -> str:
    """The same question in a terminal."""
    words, run, conditions = source.run_words, found["run"], list(found["where"])
    if run != source.run and len(queries.run_names(source.store)) > 1:
        # A run's folder names its run alone; its database names all there are.
        words = words if source.run is None else [source.store.url]
        conditions += [] if run is None else [f"run = {_quoted(run)}"]
    command = ["agentloop", "replay", "ls", *words, "--sort", str(found["sort"])]
    command += ["--ascending"] if found["ascending"] else []
    if conditions:
        whole = conditions[0] if len(conditions) == 1 else " and ".join(f"({condition})" for condition in conditions)
        command += ["--where", whole]
    return typed(command)


PAGE = Page("/buffer", "buffer.html", answer, tab="buffer", shows=shows)
OVERVIEW = Page("/buffer/overview", "overview.html", overview, tab="buffer", shows=overview_shows)
