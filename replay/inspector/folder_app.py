"""The addresses of a folder of runs: a page of all of them, and below /in/FOLDER the pages of each."""

from __future__ import annotations

from functools import partial
from urllib.parse import unquote

from anyio import to_thread
from starlette.requests import Request
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from replay.errors import ReplayError
from replay.inspector.app import with_pages
from replay.inspector.opened_runs import OpenedRuns
from replay.inspector.pages.comparing import all_runs_page
from replay.inspector.server.guard import Guard, GuardedApp
from replay.inspector.server.page_views import JSON_ENDING, Pages, error_as_json
from replay.inspector.server.query_string import address, addresses_below
from replay.inspector.server.templating import environment


def create_folder_app(runs: OpenedRuns, guard: Guard) -> ASGIApp:
    """The inspector of a folder of runs, for any ASGI server. Reads, and never writes."""
    pages = Pages(runs, environment(), place=str(runs.folder), has_buffer=False)
    of_each = Mount("/in/{folder}", app=partial(_of_one_run, runs, pages))
    return GuardedApp(with_pages((all_runs_page.PAGE,), pages, of_each), guard)


async def _of_one_run(runs: OpenedRuns, pages: Pages[OpenedRuns], scope: Scope, receive: Receive, send: Send) -> None:
    name = unquote(scope["path_params"]["folder"])
    try:
        app = await to_thread.run_sync(runs.app, name)
        status, problem = 404, f"There is no run in a folder of that name in {runs.folder}."
    except ReplayError as error:
        app, status, problem = None, 503, str(error)
    if app is None:
        request = Request(scope)
        refused = error_as_json if request.url.path.endswith(JSON_ENDING) else pages.error_page
        await refused(request, status, problem)(scope, receive, send)
        return
    with addresses_below(address("in", name)):
        await app(scope, receive, send)
