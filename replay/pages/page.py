"""Pages and forms of the inspector, and the app that serves them."""

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qsl

from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from context.wording import excerpt
from replay import questions
from replay.errors import DatabaseFailed, DatabaseRefused, InvalidRecord, ReplayError
from replay.open_buffer import OpenBuffer, ReadOnly
from replay.pages.addresses import BadQuery, read_parameter
from replay.pages.guard import is_own_form
from replay.pages.templating import environment
from replay.questions.filters import WrongFilter

Source = TypeVar("Source")
"""The source of a page's contents: an opened buffer, or a folder of runs."""
_JSON = ".json"
_LONGEST_MESSAGE = 1000
"""Characters of an error message. Messages quote parameters, which may be long."""
_LONGEST_FORM = 64 << 10
_THREADS = 3
"""Threads that answer requests. Each one keeps a database connection, and more of them would not be faster."""


@dataclass(frozen=True)
class Page(Generic[Source]):
    """An address with the function that answers it, and the template that shows the answer."""

    path: str
    """The path, with its parameters in braces."""
    template: str | None
    """None: a script asks for the page, and the values are sent as JSON."""
    shows: Callable[[Source, Request], dict[str, Any] | Response]
    """Returns the values of the template, or another response such as a redirect."""
    tab: str = ""


@dataclass(frozen=True)
class Action(Generic[Source]):
    """An address that a form is sent to, with the function that carries it out."""

    path: str
    does: Callable[[Source, Request, Mapping[str, str]], str]
    """Takes the fields of the form, and returns the address that the browser opens next."""


def build_app(
    pages: Sequence[Page[Source]],
    source: Source,
    *others: BaseRoute,
    actions: Sequence[Action[Source]] = (),
    place: str,
    has_buffer: bool = True,
    naming_damage: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Starlette:
    """Build the app that serves pages, actions, other routes and static files.

    `place` names the source on every page, and `has_buffer` tells whether pages link to the list of a buffer.
    """
    templates = environment()

    def rendered(template: str, values: dict[str, Any], *, tab: str = "", status: int = 200) -> Response:
        common = {"place": place, "has_buffer": has_buffer, "tab": tab, "run": None}
        # Models write halves of surrogate pairs, which have no UTF-8.
        shown = templates.get_template(template).render(**{**common, **values})
        return HTMLResponse(shown.encode("utf-8", "replace"), status)

    def answer(page: Page[Source], request: Request) -> Response:
        with naming_damage():
            found = page.shows(source, request)
            if isinstance(found, Response):
                return found
            return _json(found) if page.template is None else rendered(page.template, found, tab=page.tab)

    async def act(action: Action[Source], request: Request) -> Response:
        if not is_own_form(request.headers):
            raise ReadOnly("A form must be sent by a page of this inspector, got one from another site or program.")
        form = await _form(request)
        return RedirectResponse(await to_thread.run_sync(action.does, source, request, form), 303)

    def refused(request: Request, error: Exception) -> Response:
        status, message = _problem(error)
        message = excerpt(message, _LONGEST_MESSAGE)
        if request.url.path.endswith(_JSON):
            return _json({"error": message}, status)
        return rendered("error.html", {"status": status, "message": message}, status=status)

    routes = [*others, *(Route(page.path, partial(answer, page)) for page in pages)]
    routes += [Route(action.path, partial(act, action), methods=["POST"]) for action in actions]
    routes.append(Mount("/static", _StaticFiles(packages=[("replay.pages", "static")])))
    kinds: list[type[Exception]] = [HTTPException, ReplayError, ClientDisconnect, Exception]
    return Starlette(routes=routes, lifespan=_few_threads, exception_handlers=dict.fromkeys(kinds, refused))


class _StaticFiles(StaticFiles):
    """Static files that a browser keeps for a minute, so that it does not fetch them again for every page."""

    def file_response(self, *args: Any, **more: Any) -> Response:
        response = super().file_response(*args, **more)
        response.headers["Cache-Control"] = "private, max-age=60"
        return response


async def _form(request: Request) -> dict[str, str]:
    """Read the fields of a form. Raises BadQuery for a form that is too long."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _LONGEST_FORM:
            raise BadQuery(f"form must have at most {_LONGEST_FORM:,} bytes, got more. Write less.")
    return dict(parse_qsl(body.decode(errors="replace")))


@asynccontextmanager
async def _few_threads(app: Starlette) -> AsyncIterator[None]:
    to_thread.current_default_thread_limiter().total_tokens = _THREADS
    yield


def _problem(error: Exception) -> tuple[int, str]:
    if isinstance(error, HTTPException):
        return error.status_code, "This page does not exist. The links above lead to all pages."
    if not isinstance(error, ReplayError):
        # Only the terminal shows the error, which may hold text that others must not read.
        return 500, "The inspector failed to answer; its terminal says why. Other pages may work."
    if isinstance(error, BadQuery | WrongFilter | InvalidRecord):
        return 400, str(error)
    if isinstance(error, ReadOnly):
        return 403, str(error)
    return 503 if isinstance(error, DatabaseFailed | DatabaseRefused) else 404, str(error)


def _json(answer: dict[str, Any], status: int = 200) -> Response:
    # ASCII keeps halves of surrogate pairs as they are stored.
    return Response(json.dumps(answer, allow_nan=False), status, media_type="application/json")


def run_of(source: OpenBuffer, request: Request) -> str | None:
    """Return the run that a page is about: the run in the address, the opened one, or the only one. None: all runs."""
    given = read_parameter(request, "run") or source.run
    if given == "*":
        return None
    if given is not None:
        source.store.run(given)
        return given
    known = list(questions.run_names(source.store))
    return known[0] if len(known) == 1 else None
