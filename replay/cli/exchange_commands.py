"""`replay export`, and what `replay import` says: experience to files and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from replay.cli.common import AsJson, Filter, app, opened, say
from replay.exchange import ExportReport, ImportReport, export_file
from replay.exchange.teacher import TeacherReport
from replay.queries.filters import condition

ENDINGS = ".jsonl, .jsonl.gz, .jsonl.zst or .parquet"


@app.command(epilog='Example: agentloop replay export runs/quickstart-001 wins.parquet --where "success and turns < 4"')
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder, database file or postgresql:// URL.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help=f"What to write; ends in {ENDINGS}.")],
    filter: Filter = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most rows, in the order of the file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write rows with all they refer to: tokens, authors, log-probs, messages, rewards, task, group and run.

    Exit code 1 if a row is corrupt and was left out.
    """
    with opened(run) as buffer, progress_line() as show:
        report = export_file(
            buffer.store,
            file,
            run=buffer.run,
            where=None if filter is None else condition(filter),
            limit=limit,
            force=force,
            progress=lambda done, total: show("export", done, total),
        )
    size = file.stat().st_size
    if as_json:
        left = {"left_out": dict(report.left.states), "corrupt": report.left.corrupt}
        say(json.dumps({"file": str(file), "rows": report.rows, "bytes": size, **left}))
    else:
        say(export_text(report, file, size))
    raise typer.Exit(1 if report.left.corrupt else 0)


def export_text(report: ExportReport, file: Path, size: int) -> str:
    lines = [f"{report.rows:,} rows in {file} ({size / 1e6:.1f} MB)"]
    if report.left.states:
        lines.append("left out: " + ", ".join(f"{count:,} {state}" for state, count in report.left.states.items()))
    lines += [f"corrupt, left out: {id}: {reason}" for id, reason in report.left.corrupt.items()]
    return "\n".join(lines)


def import_text(report: ImportReport, file: Path) -> str:
    lines = [
        f"{report.inserted:,} rows imported from {file}, {report.duplicates:,} were there already, "
        f"{report.bad:,} bad rows left out"
    ]
    if report.learner is not None:
        others = [f", not from {count:,} of another {name}" for name, count in report.differing.items()]
        lines.append(f"run {report.learner} can learn from {report.learnable:,} of them{''.join(others)}")
    if report.clipped:
        lines.append(f"log-probs just above 0 stored as 0: {report.clipped:,}")
    lines += report.problems
    if isinstance(report, TeacherReport):
        lines += _about_conversations(report)
    return "\n".join([*lines, *report.empty_sources])


def _about_conversations(report: TeacherReport) -> list[str]:
    replies = f"{report.replies:,} replies, {report.replies_with_log_probs:,} with log-probs"
    lines = [f"{report.groups:,} groups; {replies}"]
    lines += [f"log-probs not taken from {count:,} replies: {why}" for why, count in report.log_probs_refused.items()]
    lines += report.refused_at
    if report.without_signal:
        lines.append(
            f"{report.without_signal:,} rows have advantage 0 (groups of one or of equal rewards) and teach nothing; "
            "give them one with --advantage"
        )
    if report.ignored:
        lines.append("fields not looked at: " + ", ".join(sorted(report.ignored)[:20]))
    return lines


@contextmanager
def progress_line() -> Iterator[Callable[..., None]]:
    """A line on stderr that people see and programs don't."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("rows"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda phase, done, total=None: progress.update(task, description=phase, completed=done, total=total)
