"""`agentloop worker --run RUN`: episodes for a run, collected by a process beside the learner."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from agentloop.runs.signals import end_at_once, graceful_stop
from agentloop.workers.joined_run import join_run
from agentloop.workers.worker import Worker

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog="Example: agentloop worker --run runs/search-001 --concurrency 64")
def worker(
    run: Annotated[Path, typer.Option(metavar="RUN", help="Folder of the run, which is waited for.")],
    concurrency: Annotated[int, typer.Option(min=1, help="Most episodes at once.")] = 32,
    wait: Annotated[float, typer.Option(min=0, help="Seconds for which the run may not be there yet.")] = 600.0,
) -> None:
    """Collect episodes for a run: claimed from its database, run on its engines, stored as they end."""
    with graceful_stop(_say, working="leaving; again to end at once", idle="left") as stop:
        joined = join_run(run, wait_s=wait, note=_say)
        _say(f"collecting for {run}, {concurrency} episodes at once")
        with stop.working():
            Worker(joined, concurrency=concurrency, stop=stop, say=_say).collect()
    sys.stdout.flush()
    sys.stderr.flush()
    end_at_once(stop.exit_code)  # a tool that never ends, or a database that never answers, is not waited for


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} worker: {text}", flush=True)
