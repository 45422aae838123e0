"""What a page is: an address, the question it asks, and the template that shows the answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from jinja2 import Environment
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from context.wording import excerpt
from replay import queries
from replay.errors import DatabaseFailed, DatabaseRefused, ReplayError
from replay.inspector.server.query_string import BadQuery, QueryString
from replay.queries import QueryResult
from replay.queries.filters import WrongFilter
from replay.queries.open_buffer import OpenBuffer

Source = TypeVar("Source")
"""What pages ask: a buffer that was opened, or a folder of runs."""
JSON_ENDING = ".json"
"""Ends the address of a page's answer as JSON."""
_LONGEST_MESSAGE = 1000
"""Characters: a message holds what was asked, which may be long."""


class Redirect(Exception):
    """The page stands at another address."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.address = address


@dataclass(frozen=True)
class Mistake:
    """A filter that can't be read."""

    text: str
    error: str


@dataclass(frozen=True)
class Page(Generic[Source]):
    """One page, or a part of one that is fetched by itself."""

    path: str
    """With parameters in braces."""
    template: str
    answer: Callable[[Source, QueryString], QueryResult]
    """JSON-able: it is the answer as JSON, and all that the template knows."""
    tab: str = ""
    """Which link of the navigation is the current one."""
    shows: Callable[[Source, QueryString, QueryResult], dict[str, Any]] = lambda *_: {}
    """What only the template needs, made from the answer: scales, drawings, addresses."""
    at_once: Callable[[Source, QueryString], QueryResult | None] = lambda *_: None
    """What is shown instead where the answer would take long, and a page should not; None: it does not."""
    understood: Callable[[QueryString], tuple[QueryString, list[Mistake]]] | None = None
    """What of an address can be answered though a filter can't be read, for the page to stay and say so beside it.
    As JSON such an address is refused."""


class Pages(Generic[Source]):
    """Answers requests for one source. `place` names it on every page; `has_buffer`: there is one to be listed."""

    def __init__(
        self,
        source: Source,
        templates: Environment,
        *,
        place: str,
        has_buffer: bool = True,
        naming_damage: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._source = source
        self._naming_damage = naming_damage
        self._templates = templates
        self._common = {"place": place, "has_buffer": has_buffer}

    def page(self, page: Page[Source], request: Request) -> Response:
        return self._guarded(request, lambda: self._html(request, page), self.error_page)

    def as_json(self, page: Page[Source], request: Request) -> Response:
        def answer() -> Response:
            try:
                return _json(page.answer(self._source, _query(request)))
            except Redirect as other:
                path, mark, query = other.address.partition("?")
                raise Redirect(path + JSON_ENDING + mark + query) from other

        return self._guarded(request, answer, error_as_json)

    def _html(self, request: Request, page: Page[Source]) -> Response:
        query = _query(request)
        if page.understood is None:
            return self._answered(request, page, query)
        try:
            return self._answered(request, page, query, mistakes=[])
        except WrongFilter:
            query, mistakes = page.understood(query)
            return self._answered(request, page, query, mistakes=mistakes)

    def _answered(self, request: Request, page: Page[Source], query: QueryString, **more: Any) -> Response:
        answer = page.at_once(self._source, query) or page.answer(self._source, query)
        shown = page.shows(self._source, query, answer)
        return self._rendered(request, page.template, {**answer, **shown, **more}, tab=page.tab)

    def _rendered(
        self, request: Request, template: str, values: dict[str, Any], *, tab: str, status: int = 200
    ) -> Response:
        # What is not there, or not understood, has no address as JSON either, and its address may be anything.
        json_address = _json_address(request) if status == 200 and not values.get("mistakes") else None
        common = {**self._common, "tab": tab, "json_address": json_address}
        text = self._templates.get_template(template).render(**common, **values)
        # A lone surrogate, which models do write, has no UTF-8.
        return HTMLResponse(text.encode("utf-8", "replace"), status)

    def error_page(self, request: Request, status: int, message: str) -> Response:
        values = {"status": status, "message": excerpt(message, _LONGEST_MESSAGE), "run": None}
        return self._rendered(request, "error.html", values, tab="", status=status)

    def _guarded(
        self, request: Request, respond: Callable[[], Response], refused: Callable[[Request, int, str], Response]
    ) -> Response:
        try:
            with self._naming_damage():
                return respond()
        except Redirect as other:
            return RedirectResponse(other.address, 303)
        except (BadQuery, WrongFilter) as error:
            return refused(request, 400, str(error))
        except (DatabaseFailed, DatabaseRefused) as error:
            return refused(request, 503, str(error))
        except ReplayError as error:
            return refused(request, 404, str(error))


def _json_address(request: Request) -> str:
    # As it stood in the address: the path of a request has been read once already.
    path = quote(request.url.path)
    path += "index" * path.endswith("/")
    return path + JSON_ENDING + (f"?{request.url.query}" if request.url.query else "")


def error_as_json(request: Request, status: int, message: str) -> Response:
    return _json({"error": excerpt(message, _LONGEST_MESSAGE)}, status)


def _json(answer: QueryResult, status: int = 200) -> Response:
    # ASCII: a lone surrogate is written as it was stored.
    text = json.dumps(answer, allow_nan=False)
    return Response(text, status, media_type="application/json")


def _query(request: Request) -> QueryString:
    return QueryString(request.query_params.multi_items(), request.path_params)


def run_of(source: OpenBuffer, query: QueryString) -> str | None:
    """The run a page is about: as asked, as opened, or the only one; None: all of the database's."""
    given = query.text("run") or source.run
    if given == "*":
        return None
    if given is not None:
        source.store.run(given)
        return given
    known = list(queries.run_names(source.store))
    return known[0] if len(known) == 1 else None
