"""`agentloop inspect | report | env | context | replay`: what looks at environments, buffers and templates, imported
when called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentloop.cli.context_commands import app as context_app
from agentloop.cli.env_commands import app as env_app
from agentloop.cli.inspect_command import inspect
from agentloop.cli.replay import app as replay_app
from agentloop.cli.replay.common import Run, RunId, opened
from replay.questions.open_buffer import asked_run

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
app.add_typer(context_app, name="context", epilog="Example: agentloop context check template.jinja")
app.add_typer(env_app, name="env", epilog="Example: agentloop env check examples/calculator.py:Calculator")
app.add_typer(replay_app, name="replay", epilog="Example: agentloop replay ls --failed")
app.command(epilog="Example: agentloop inspect runs/quickstart-001")(inspect)


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
    from agentloop.runs.run_folder import explained
    from agentloop.runs.run_report import report_run
    from replay.pages.report import REPORT_NAME

    with opened(run) as buffer:
        path = out or (buffer.folder or Path()) / REPORT_NAME
        with explained(path, option="--out", advice="Choose another with --out FILE."):
            print(report_run(buffer.store, path, run=asked_run(buffer, run_id)))
