"""`agentloop replay demonstrations`: what a run did well, for `agentloop sft`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentloop.analysis.stored_demonstrations import write_demonstrations
from agentloop.cli.replay_commands import run_folder_of
from agentloop.environments import open_tasks
from replay.cli.common import opened, say
from replay.cli.exchange_commands import export_text, progress_line
from replay.queries.filters import condition

_ENDINGS = ".jsonl, .jsonl.gz or .jsonl.zst"


def demonstrations(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help=f"What to write; ends in {_ENDINGS}.")],
    filter: Annotated[
        str, typer.Option("--where", metavar="FILTER", help="Only these, of the rows that ended with an answer.")
    ] = "success",
    limit: Annotated[int | None, typer.Option(min=1, help="Most rows, in the order of the file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
) -> None:
    """Write successes as conversations in OpenAI's chat format, with their tools: what `agentloop sft` learns from.

    Rows of another environment or version are left out, for their tools are not known. Exit code 1 if a row is corrupt
    and was left out.
    """
    with opened(run) as buffer, progress_line() as show:
        folder = run_folder_of(buffer)
        environments, _ = open_tasks(folder.config, folder.environments)
        found = write_demonstrations(
            buffer.store,
            environments,
            file,
            run=buffer.run,
            where=condition(filter),
            limit=limit,
            force=force,
            progress=lambda done, total: show("write", done, total),
        )
    say(export_text(found, file, file.stat().st_size))
    raise typer.Exit(1 if found.left.corrupt else 0)
