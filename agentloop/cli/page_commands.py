"""`agentloop inspect | report`: the pages of a buffer, in a browser and as one file."""

import secrets
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from agentloop.cli.replay.common import Run, RunId, fail, opened
from replay.exchange import import_file
from replay.exchange.files import JSONL, PARQUET
from replay.locate import DATABASE, is_folder_of_runs
from replay.open_buffer import find_run, open_buffer
from replay.store import ReplayStore

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog="Example: agentloop inspect runs/quickstart-001")
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
    """Show a buffer and its runs in a browser, live: on this machine, without a model.

    RUN may be a folder of runs: all of them in one list, their curves in the same charts, and the pages of each. It may
    also be a file that `replay export` wrote.
    """
    try:
        from replay.pages.app import create_app, create_folder_app
        from replay.pages.serve import check_token, serve
        from replay.pages.views.runs_page import OpenedRuns
    except ModuleNotFoundError as error:
        fail(f"inspect must have {error.name} installed, got none. pip install 'agentloop-replay[inspect]'")
    token = secrets.token_urlsafe(24) if token == "auto" else token
    check_token(host, token)
    with ExitStack() as stack:
        if run is not None and is_folder_of_runs(Path(run)):
            runs = stack.enter_context(closing(OpenedRuns(Path(run))))
            app, shown = create_folder_app(runs, token=token, host=host), run
        else:
            file = run if run is not None and run.endswith((PARQUET, *JSONL)) else None
            source = stack.enter_context(open_buffer(run if file is None else _imported(file, stack)))
            shown = file or source.store.url
            app = create_app(source, token=token, host=host, place=shown)
        serve(app, shown, host=host, port=port, token=token, browser=browser)


def _imported(file: str, stack: ExitStack) -> str:
    """A database with the rows of a file, which is deleted with the stack."""
    print(f"{file}: its rows go into a temporary database first", flush=True)
    database = Path(stack.enter_context(TemporaryDirectory()), DATABASE)
    with closing(ReplayStore.create(database)) as store:
        rows = import_file(store, Path(file), name=None).inserted
    print(f"{file}: {rows:,} rows in a temporary database, in which labels last until Ctrl-C")
    return str(database)


@app.command(epilog="Example: agentloop report runs/quickstart-001 --out quickstart.html")
def report(
    run: Run = None,
    run_id: RunId = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Where to; report.html in the run folder when left out."),
    ] = None,
) -> None:
    """Write a run's page as one file to send to somebody: all curves, and nothing is fetched."""
    from agentloop.errors import explaining_disk
    from agentloop.runs.run_report import report_run
    from replay.pages.report import REPORT_NAME

    with opened(run) as buffer:
        path = out or (buffer.folder or Path()) / REPORT_NAME
        with explaining_disk(path, option="--out", advice="Choose another with --out FILE."):
            print(report_run(buffer.store, path, run=find_run(buffer, run_id)))
