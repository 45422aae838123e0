"""`replay export | import`: experience to files and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from replay.cli.front import AsJson, Run, Where, app, opened
from replay.exchange import ExportReport, ImportReport, export_file, import_file
from replay.where import condition

_ENDINGS = ".jsonl, .jsonl.gz, .jsonl.zst or .parquet"


@app.command(epilog='Example: agentloop replay export runs/quickstart-001 wins.parquet --where "success and turns<4"')
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder, database file or postgresql:// URL.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help=f"What to write; ends in {_ENDINGS}.")],
    where: Where = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most rows, in the order of the file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write rows with all they refer to: tokens, authors, log-probs, messages, rewards, task, group and run.

    Exit code 1 if a row is corrupt and was left out.
    """
    with opened(run) as buffer, _progress() as told:
        report = export_file(
            buffer.store,
            file,
            run=buffer.run,
            where=None if where is None else condition(where),
            limit=limit,
            force=force,
            told=lambda done, total: told("export", done, total),
        )
    size = file.stat().st_size
    if as_json:
        left = {"left_out": dict(report.left.states), "corrupt": report.left.corrupt}
        print(json.dumps({"file": str(file), "rows": report.rows, "bytes": size, **left}))
    else:
        print(_export_text(report, file, size))
    raise typer.Exit(1 if report.left.corrupt else 0)


@app.command("import", epilog="Example: agentloop replay import wins.parquet runs/quickstart-002 --name wins")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help=f"An exported file; ends in {_ENDINGS}.")],
    run: Run = None,
    name: Annotated[str, typer.Option(help="What the set is called: the source of its rows.")] = "import",
    keep_source: Annotated[
        bool, typer.Option("--keep-source", help="Let every row keep the source it was exported with.")
    ] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Count bad rows and leave them out; without it, one is enough to stop.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Store the rows of a file. Rows that are stored already stay as they are, so a file can be imported again.

    Every row is checked before the first is stored.
    """
    with opened(run, read_only=False) as buffer, _progress() as told:
        report = import_file(
            buffer.store,
            file,
            name=None if keep_source else name,
            skip_bad=skip_bad,
            told=lambda phase, done: told(phase, done, None),
        )
    print(json.dumps(asdict(report)) if as_json else _import_text(report, file))


def _export_text(report: ExportReport, file: Path, size: int) -> str:
    lines = [f"{report.rows:,} rows in {file} ({size / 1e6:.1f} MB)"]
    if report.left.states:
        lines.append("left out: " + ", ".join(f"{count:,} {state}" for state, count in report.left.states.items()))
    lines += [f"corrupt, left out: {id}: {reason}" for id, reason in report.left.corrupt.items()]
    return "\n".join(lines)


def _import_text(report: ImportReport, file: Path) -> str:
    lines = [
        f"{report.inserted:,} rows imported from {file}, {report.duplicates:,} were there already, "
        f"{report.bad:,} bad rows left out"
    ]
    if report.clipped:
        lines.append(f"log-probs just above 0 stored as 0: {report.clipped:,}")
    lines += report.problems
    return "\n".join(lines)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """A line on stderr that people see and programs don't."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("rows"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda phase, done, total: progress.update(task, description=phase, completed=done, total=total)
