"""The `replay` commands' common ground: the app, the RUN argument, and a buffer that was opened."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from context.visible import visible_lines
from replay.databases.open import DATABASE, Location, run_identity
from replay.errors import ReplayError
from replay.stats import runs
from replay.store import ReplayStore

app = typer.Typer(
    help="Look into a replay buffer.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


Run = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN", help="Run folder, database file or postgresql:// URL; the newest under ./runs when left out."
    ),
]
RunId = Annotated[
    str | None, typer.Option("--run", metavar="ID", help="Id or name of the run, in a database that several share.")
]
Where = Annotated[
    str | None,
    typer.Option(
        "--where", metavar="FILTER", help="Only these, for example \"reward>0.5 and staleness<8 and tool='lookup'\"."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@dataclass(frozen=True)
class Opened:
    """What RUN names."""

    store: ReplayStore
    folder: Path | None
    """Of the run, where there is one: its tokenizer is there."""
    run: str | None
    """The run asked about, in a database that other runs may share; None: all of the database's."""


def newest_run_folder(runs: Path = Path("runs")) -> Path:
    """The folder whose buffer was last written to; of two written at once, the higher-numbered."""
    written = [
        (_last_written(folder), folder.name, folder)
        for folder in (runs.iterdir() if runs.is_dir() else ())
        if (folder / DATABASE).is_file() or run_identity(folder).database is not None
    ]
    if not written:
        begun = max(runs.glob("*/run.json"), key=lambda file: file.stat().st_mtime_ns, default=None)
        none = f"RUN must be given when there is no run under {runs.absolute()}, got none."
        fail(_has_none_yet(begun.parent) if begun else none)
    return max(written)[2]


def _has_none_yet(folder: Path) -> str:
    return f"RUN must have a buffer, got {folder}: a run makes it once its model is ready. Then ask again."


def _last_written(folder: Path) -> int:
    """A run whose buffer is on a server writes its metrics here."""
    files = [folder / DATABASE] if (folder / DATABASE).is_file() else [folder / "metrics.jsonl", folder / "run.json"]
    return max(file.stat().st_mtime_ns for file in files if file.is_file())


@contextmanager
def opened(run: str | None, *, read_only: bool = True) -> Iterator[Opened]:
    """The buffer; what is wrong with it, or with what it is asked, is told in one line."""
    location, folder, id = place(run)
    try:
        store = ReplayStore.open(location, read_only=read_only)
        try:
            yield Opened(store, folder, id)
        finally:
            store.close()
    except ReplayError as error:
        fail(str(error))


def asked_run(buffer: Opened, name: str | None) -> str:
    """The id of the run called so; without a name the one of RUN's folder, or the only one that updated anything."""
    known = runs(buffer.store)
    own = buffer.run or (run_identity(buffer.folder).id if buffer.folder else None)
    found = [row for row in known if (name or own) in (row["id"], row["name"])]
    if not found and name is None:
        found = [row for row in known if row["iterations"]] or known
    if len(found) != 1:
        listed = ", ".join(f"{row['name']} ({row['id']})" for row in found or known) or "none"
        asked = f"got {name!r} where there are" if name else "got"
        fail(f"RUN must be one run of {buffer.store.url}, {asked} {listed}. Give its folder, or its id with --run.")
    return str(found[0]["id"])


def place(run: str | None) -> tuple[Location, Path | None, str | None]:
    """The database, the run folder, and the run where the database is not its own."""
    if run is not None and "://" in run:
        return run, None, None
    path = newest_run_folder() if run is None else Path(run)
    if not os.path.isdir(path):
        return path, path.parent, None
    identity = run_identity(path)
    if identity.database is None:
        if identity.id is not None and not (path / DATABASE).exists():
            fail(_has_none_yet(path))
        return path / DATABASE, path, None
    return identity.database, path, identity.id


def say(text: str, *, error: bool = False) -> None:
    """All that commands print of a buffer goes through here: nothing that was stored acts on the terminal."""
    print(visible_lines(text), file=sys.stderr if error else sys.stdout)


def fail(message: str) -> NoReturn:
    say(f"agentloop: {message}", error=True)
    raise typer.Exit(2)
