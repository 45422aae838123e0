"""`agentloop inspect`."""

from __future__ import annotations

import secrets
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from replay.cli.common import Run, fail
from replay.locate import is_folder_of_runs


def inspect(
    run: Run = None,
    host: Annotated[str, typer.Option(help="Address to listen on; one that others reach needs --token.")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="0: any that is free; 7717 or the next free one when left out.")
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="AGENTLOOP_INSPECT_TOKEN", help="What a browser must bring, 16 characters or more; auto makes one."
        ),
    ] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open a browser.")] = True,
) -> None:
    """Show a buffer and its runs in a browser, live: read-only, on this machine, without a model.

    RUN may be a folder of runs: all of them in one list, their curves in the same charts, and the pages of each.
    """
    try:
        from replay.inspector.app import create_app
        from replay.inspector.folder_app import create_folder_app
        from replay.inspector.opened_runs import OpenedRuns
        from replay.inspector.serve import serve
    except ModuleNotFoundError as error:
        fail(f"inspect must have {error.name} installed, got none. pip install 'agentloop-replay[inspect]'")
    from replay.queries.open_buffer import open_buffer

    token = secrets.token_urlsafe(24) if token == "auto" else token
    with ExitStack() as stack:
        if run is not None and is_folder_of_runs(Path(run)):
            runs = stack.enter_context(closing(OpenedRuns(Path(run))))
            made, shown = partial(create_folder_app, runs), run
        else:
            source = stack.enter_context(open_buffer(run))
            made, shown = partial(create_app, source), source.store.url
        serve(made, shown, host=host, port=port, token=token, browser=browser)
