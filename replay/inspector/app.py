"""The addresses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from replay.inspector.pages import (
    buffer_page,
    cluster_page,
    held_out_page,
    iteration_page,
    mixing_page,
    run_page,
    runs_page,
    task_page,
    trajectory_page,
)
from replay.inspector.pages.comparing import compare_page
from replay.inspector.server.guard import Guard, GuardedApp
from replay.inspector.server.page_views import JSON_ENDING, Page, Pages, Source, error_as_json
from replay.inspector.server.templating import environment
from replay.queries.open_buffer import OpenBuffer

PAGES: tuple[Page[OpenBuffer], ...] = (
    runs_page.PAGE,
    run_page.PAGE,
    cluster_page.PAGE,
    iteration_page.PAGE,
    held_out_page.TASK,
    held_out_page.PAGE,
    buffer_page.PAGE,
    buffer_page.OVERVIEW,
    trajectory_page.TOKENS,
    trajectory_page.MESSAGE,
    trajectory_page.PAGE,
    task_page.PAGE,
    compare_page.PAGE,
    mixing_page.PAGE,
)

_THREADS = 3
"""Each keeps a connection and some megabytes of its own; more of them would answer no sooner."""


@asynccontextmanager
async def _few_threads(app: Starlette) -> AsyncIterator[None]:
    to_thread.current_default_thread_limiter().total_tokens = _THREADS
    yield


def create_app(source: OpenBuffer, guard: Guard) -> ASGIApp:
    """The inspector of one source, for any ASGI server. Reads, and never writes."""
    store = source.store
    pages = Pages(source, environment(), place=store.url, naming_damage=store.naming_damage)
    return GuardedApp(with_pages(PAGES, pages), guard)


def with_pages(served: Sequence[Page[Source]], pages: Pages[Source], *others: BaseRoute) -> Starlette:
    """Their addresses, the `others`, and the files that pages are made with."""

    def missing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return refused(request, error.status_code, "There is no such page. The links above lead to those there are.")

    def broken(request: Request, error: Exception) -> Response:
        # The server prints the error; it may hold what nobody else should read.
        return refused(request, 500, "The inspector failed to answer; its terminal says why. Other pages may work.")

    def refused(request: Request, status: int, message: str) -> Response:
        return (error_as_json if request.url.path.endswith(JSON_ENDING) else pages.error_page)(request, status, message)

    routes: list[BaseRoute] = [*others]
    for page in served:
        json_address = "/index" if page.path == "/" else page.path
        routes.append(Route(json_address + JSON_ENDING, partial(pages.as_json, page)))
        routes.append(Route(page.path, partial(pages.page, page)))
    routes.append(Mount("/static", StaticFiles(packages=[("replay.inspector", "static")])))
    return Starlette(
        routes=routes, lifespan=_few_threads, exception_handlers={HTTPException: missing, Exception: broken}
    )
