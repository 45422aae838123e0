"""The inspector of one buffer, and the inspector of a folder of runs, which has each run's pages below /in/FOLDER."""

from functools import partial
from urllib.parse import unquote

from anyio import to_thread
from starlette.exceptions import HTTPException
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from replay.open_buffer import OpenBuffer
from replay.pages.actions import ACTIONS
from replay.pages.addresses import address, addresses_below
from replay.pages.guard import LOOPBACK, guarded
from replay.pages.page import Page, build_app
from replay.pages.views import (
    buffer_page,
    cost_page,
    iteration_page,
    mixing_page,
    run_page,
    runs_page,
    trajectory_page,
)
from replay.pages.views.runs_page import OpenedRuns

PAGES: tuple[Page[OpenBuffer], ...] = (
    runs_page.PAGE,
    runs_page.DIFFERENCES,
    runs_page.TASKS,
    run_page.PAGE,
    run_page.CLUSTER,
    iteration_page.PAGE,
    run_page.HELD_OUT_TASK,
    run_page.HELD_OUT,
    run_page.REPLAYED,
    run_page.AFTER_REPLAY,
    cost_page.TOOLS_PAGE,
    cost_page.COST_PAGE,
    buffer_page.PAGE,
    buffer_page.OVERVIEW,
    trajectory_page.TOKENS,
    trajectory_page.PAGE,
    buffer_page.TASKS,
    buffer_page.SLICES,
    buffer_page.OUTCOMES,
    buffer_page.TASK,
    mixing_page.PAGE,
)


def create_app(
    source: OpenBuffer, *, token: str | None = None, host: str = LOOPBACK[0], place: str | None = None
) -> ASGIApp:
    """Make the inspector of one buffer, for any ASGI server. Pages name `place` (None: the database) as its source."""
    return guarded(_build_buffer_app(source, place), token=token, host=host)


def create_folder_app(runs: OpenedRuns, *, token: str | None = None, host: str = LOOPBACK[0]) -> ASGIApp:
    """Make the inspector of a folder of runs, for any ASGI server."""
    of_each = Mount("/in/{folder}", app=partial(_serve_run, runs))
    pages = (runs_page.PAGE, runs_page.DIFFERENCES, runs_page.TASKS)
    app = build_app(pages, runs, of_each, place=str(runs.folder), has_buffer=False)
    return guarded(app, token=token, host=host)


def _build_buffer_app(source: OpenBuffer, place: str | None = None) -> ASGIApp:
    damage = source.store.naming_damage
    return build_app(PAGES, source, actions=ACTIONS, place=place or source.store.url, naming_damage=damage)


async def _serve_run(runs: OpenedRuns, scope: Scope, receive: Receive, send: Send) -> None:
    name = unquote(scope["path_params"]["folder"])
    app = await to_thread.run_sync(partial(runs.app, name, _build_buffer_app))
    if app is None:
        raise HTTPException(404)
    with addresses_below(address("in", name)):
        await app(scope, receive, send)
