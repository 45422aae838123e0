"""The commands `replay export | import | demonstrations`, which write experience to files and read it back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from agentloop.algorithms.baselines.grpo import group_advantages
from agentloop.cli.options import AsJson
from agentloop.cli.replay.common import Filter, Force, Run, app, fail, opened, run_folder_of, say, say_json
from agentloop.errors import UserError
from replay import questions
from replay.exchange import ExportReport, ImportReport, export_file, import_file
from replay.exchange.teacher import SOURCE, TeacherReport, import_chat, teaching_of
from replay.locate import START, run_identity
from replay.next_batch import empty_sources
from replay.open_buffer import OpenBuffer
from replay.questions import chosen

if TYPE_CHECKING:
    from agentloop.environments import RunEnvironments

_ENDINGS = ".jsonl, .jsonl.gz or .parquet"
_CHAT_ENDINGS = ".jsonl or .jsonl.gz"
Unique = Annotated[bool, typer.Option("--unique", help="Of rows with equal tokens only the first.")]


@app.command(
    epilog="Example: agentloop replay export runs/quickstart-001 wins.parquet --where 'success and num_turns < 4'"
)
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, a database file or a URL.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help=f"What to write; ends in {_ENDINGS}.")],
    filter: Filter = None,
    unique: Unique = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write rows with all they refer to: tokens, authors, log-probs, messages, rewards, task, group and run.

    Exit code 1 if a row is corrupt and was left out.
    """
    from agentloop.analysis.stored_demonstrations import offered_tools

    with opened(run) as buffer, _progress_line() as show:
        report = export_file(
            buffer.store,
            file,
            where=chosen(buffer.run, filter),
            force=force,
            unique=unique,
            tools_of=partial(offered_tools, _environments(buffer, required=False)),
            progress=partial(show, "export"),
        )
    _end_with(report, file, as_json=as_json)


@app.command("import", epilog="Example: agentloop replay import wins.parquet runs/quickstart-002 --name wins")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help=f"An exported file; ends in {_ENDINGS}.")],
    run: Run = None,
    form: Annotated[
        Literal["agentloop", "openai-chat"],
        typer.Option("--format", help="What FILE holds: exported rows, or one conversation a line."),
    ] = "agentloop",
    name: Annotated[
        str | None,
        typer.Option(help="What the set is called: the source of its rows. [import, or teacher for conversations]"),
    ] = None,
    keep_source: Annotated[
        bool, typer.Option("--keep-source", help="Let every row keep the source it was exported with.")
    ] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Count bad rows and leave them out; without it, one is enough to stop.")
    ] = False,
    reward: Annotated[float | None, typer.Option(help="Conversations: of rows that name none.")] = None,
    advantage: Annotated[
        float | None, typer.Option(help="Conversations: of every row; from the rewards of its group when left out.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Store the rows of a file, in a new database if RUN names one that ends in .sqlite. Rows that are stored already
    stay as they are.

    Every row is checked before the first is stored. With --format openai-chat, each line is a conversation
    ({"messages": [...], "tools": [...], "reward": 1.0}) and becomes the tokens that RUN's policy would have said.
    """
    are_conversations = form == "openai-chat"
    if not are_conversations and (reward, advantage) != (None, None):
        fail("--reward and --advantage must come with --format openai-chat, got another format.")
    if are_conversations and keep_source:
        fail("--keep-source must come with exported rows, got conversations, which have no source.")
    source = None if keep_source else name or (SOURCE if are_conversations else "import")
    report: ImportReport
    is_new = run is not None and run.endswith(".sqlite") and not are_conversations and not os.path.lexists(run)
    with opened(run, read_only=False, create=is_new) as buffer, _progress_line() as show:
        learner = buffer.own_run
        if are_conversations:
            model = None if buffer.folder is None else buffer.folder / START
            teaching = teaching_of(buffer.store, learner, model, group_advantages, reward=reward, advantage=advantage)
            learner = teaching.run.id
            report = import_chat(buffer.store, file, teaching, name=source or SOURCE, skip_bad=skip_bad, progress=show)
        else:
            report = import_file(buffer.store, file, name=source, skip_bad=skip_bad, progress=show)
        if learner is not None and learner in questions.run_names(buffer.store):
            named = [] if source is None else [source]
            report.empty_sources = empty_sources(buffer.store, learner, named=named)
    say_json(asdict(report), indent=None) if as_json else say(_import_text(report, file))


@app.command(
    epilog="Example: agentloop replay demonstrations runs/quickstart-001 wins.jsonl --where 'success and num_turns < 4'"
)
def demonstrations(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or a database of agents' sessions.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help=f"What to write; ends in {_CHAT_ENDINGS}.")],
    filter: Annotated[
        str, typer.Option("--where", metavar="FILTER", help="Only these, of the rows that ended with an answer.")
    ] = "success",
    unique: Unique = False,
    force: Force = False,
) -> None:
    """Write successes as conversations in OpenAI's chat format, with their tools: what `agentloop sft` learns from.

    Rows of another environment or version are left out, for their tools are not known. Exit code 1 if a row is corrupt
    and was left out.
    """
    from agentloop.analysis.stored_demonstrations import write_demonstrations

    with opened(run) as buffer, _progress_line() as show:
        found = write_demonstrations(
            buffer.store,
            _environments(buffer),
            file,
            where=chosen(buffer.run, filter),
            force=force,
            unique=unique,
            progress=partial(show, "write"),
        )
    _end_with(found, file)


def _environments(buffer: OpenBuffer, *, required: bool = True) -> RunEnvironments | None:
    """The run's environments, which know their tools. None: RUN is a database alone, which has the tools of sessions,
    or they are not `required` and can't be opened."""
    from agentloop.environments import open_tasks

    if buffer.folder is None or run_identity(buffer.folder).id is None:
        return None
    try:
        folder = run_folder_of(buffer)
        return open_tasks(folder.config, folder.environments)[0]
    except UserError as error:
        if required:
            raise
        say(f"agentloop: the column tools is empty where it is the environment's: {error}", error=True)
        return None


def _end_with(report: ExportReport, file: Path, *, as_json: bool = False) -> NoReturn:
    """Print what was written, and exit."""
    size = file.stat().st_size
    lines = [f"{report.rows:,} rows in {file} ({size / 1e6:.1f} MB)"]
    if report.left:
        lines.append("left out: " + ", ".join(f"{count:,} {state}" for state, count in report.left.items()))
    lines += [f"corrupt, left out: {id}: {reason}" for id, reason in report.corrupt.items()]
    facts = {"file": str(file), "rows": report.rows, "bytes": size, "left_out": report.left, "corrupt": report.corrupt}
    say_json(facts, indent=None) if as_json else say("\n".join(lines))
    raise typer.Exit(1 if report.corrupt else 0)


def _import_text(report: ImportReport, file: Path) -> str:
    lines = [
        f"{report.inserted:,} rows imported from {file}, {report.duplicates:,} were there already, "
        f"{report.bad:,} bad rows left out"
    ]
    lines += report.problems
    if isinstance(report, TeacherReport):
        lines.append(f"{report.groups:,} groups; {report.replies:,} replies")
        if report.without_signal:
            lines.append(
                f"{report.without_signal:,} rows have advantage 0 (groups of one or of equal rewards) and teach "
                "nothing; give them one with --advantage"
            )
        if report.ignored:
            lines.append("fields not looked at: " + ", ".join(sorted(report.ignored)[:20]))
    return "\n".join([*lines, *report.empty_sources])


@contextmanager
def _progress_line() -> Iterator[Callable[..., None]]:
    """Show progress in a line on stderr if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("rows"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda phase, done, total=None: progress.update(task, description=phase, completed=done, total=total)
