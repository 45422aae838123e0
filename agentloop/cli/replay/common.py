"""The parts that all `replay` commands share: the app, common arguments, an opened buffer, and output."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from agentloop.cli.options import command_group
from context.wording import visible_lines
from replay.errors import ReplayError
from replay.open_buffer import OpenBuffer, open_buffer
from replay.store import ReplayStore

if TYPE_CHECKING:
    from agentloop.runs.run_folder import RunFolder

app = command_group(help="Look into a replay buffer.", epilog="Example: agentloop replay ls --failed")
Run = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN", help="Run folder, database file or postgresql:// URL; the newest under ./runs when left out."
    ),
]
RunId = Annotated[
    str | None, typer.Option("--run", metavar="ID", help="Id or name of the run, in a database that several share.")
]
Filter = Annotated[
    str | None,
    typer.Option(
        "--where",
        metavar="FILTER",
        help="Only these, for example \"reward > 0.5 and staleness < 8 and tool == 'lookup'\".",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite FILE.")]


@contextmanager
def opened(run: str | None, *, read_only: bool = True, create: bool = False) -> Iterator[OpenBuffer]:
    """Open the buffer of RUN, or `create` it.

    A ReplayError within the block is printed in one line and ends the command.
    """
    try:
        if create:
            ReplayStore.create(Path(str(run))).close()
        with open_buffer(run, read_only=read_only) as buffer:
            yield buffer
    except ReplayError as error:
        fail(str(error))


def say(text: str, *, error: bool = False) -> None:
    """Print text. Control characters, which stored text may have, are written out."""
    print(visible_lines(text), file=sys.stderr if error else sys.stdout)


def say_json(answer: Any, *, indent: int | None = 1) -> None:
    say(json.dumps(answer, indent=indent))


def fail(message: str) -> NoReturn:
    say(f"agentloop: {message}", error=True)
    raise typer.Exit(2)


def run_folder_of(buffer: OpenBuffer) -> RunFolder:
    from agentloop.runs.run_folder import open_run_folder

    if buffer.folder is None:
        fail("RUN must be a run's folder, which has the model's configuration, got a database. Name the run's folder.")
    return open_run_folder(buffer.folder)
