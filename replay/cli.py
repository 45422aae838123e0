"""`agentloop replay ...`: look into a buffer without changing it."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from context.authors import AuthorTable
from context.codec import TokenCodec
from context.view import token_view
from replay import stats as questions
from replay.databases.open import DATABASE, Location, run_identity
from replay.errors import ReplayError
from replay.stats import Sort
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
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@app.command(epilog="Example: agentloop replay stats runs/quickstart-001")
def stats(run: Run = None, as_json: AsJson = False) -> None:
    """What is in the buffer, and what was drawn from it."""
    with _opened(run) as buffer:
        answer = questions.summary(buffer.store, buffer.run)
    print(json.dumps(answer, indent=1) if as_json else _summary_text(answer))


@app.command(epilog="Example: agentloop replay ls --failed --sort tokens --limit 5")
def ls(
    run: Run = None,
    success: Annotated[bool | None, typer.Option("--success/--failed", help="Only these; both when left out.")] = None,
    sort: Annotated[Sort, typer.Option(help="The greatest come first.")] = Sort.iteration,
    limit: Annotated[int, typer.Option(min=1, help="Most rows printed.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List trajectories, one line each."""
    with _opened(run) as buffer:
        found = questions.trajectories(buffer.store, buffer.run, success=success, sort=sort, limit=limit)
    print(json.dumps(found, indent=1) if as_json else _listing_text(found))


@app.command(epilog="Example: agentloop replay show 3f9a21 runs/quickstart-001")
def show(
    id: Annotated[str, typer.Argument(metavar="ID", help="A trajectory's id, or the beginning of it.")],
    run: Run = None,
    as_json: AsJson = False,
) -> None:
    """One trajectory: every token with its author and mask, its log-probs, and every update that used it."""
    with _opened(run) as buffer:
        answer = questions.trajectory(buffer.store, id)
        if as_json:
            print(json.dumps(answer, indent=1))
        else:
            _print_trajectory(buffer, answer)


@dataclass(frozen=True)
class _Opened:
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
        _fail(f"RUN must be given when there is no run under {runs.absolute()}, got none.")
    return max(written)[2]


def _last_written(folder: Path) -> int:
    """A run whose buffer is on a server writes its metrics here."""
    files = [folder / DATABASE] if (folder / DATABASE).is_file() else [folder / "metrics.jsonl", folder / "run.json"]
    return max(file.stat().st_mtime_ns for file in files if file.is_file())


@contextmanager
def _opened(run: str | None) -> Iterator[_Opened]:
    """The buffer, read-only; what is wrong with it is told in one line."""
    location, folder, id = _place(run)
    try:
        store = ReplayStore.open(location, read_only=True)
        try:
            yield _Opened(store, folder, id)
        finally:
            store.close()
    except ReplayError as error:
        _fail(str(error))


def _place(run: str | None) -> tuple[Location, Path | None, str | None]:
    """The database, the run folder, and the run where the database is not its own."""
    if run is not None and "://" in run:
        return run, None, None
    path = newest_run_folder() if run is None else Path(run)
    if not os.path.isdir(path):
        return path, path.parent, None
    identity = run_identity(path)
    if identity.database is None:
        return path / DATABASE, path, None
    return identity.database, path, identity.id


def _fail(message: str) -> NoReturn:
    print(f"agentloop: {message}", file=sys.stderr)
    raise typer.Exit(2)


def _summary_text(answer: dict[str, Any]) -> str:
    drawn = answer["draws"]
    lines = [
        f"{answer['database']}  ({answer['bytes'] / 1e6:.1f} MB)",
        f"iterations    {answer['iterations']:,}, policies {answer['policies']:,}, runs {answer['runs']:,}",
        f"trajectories  {answer['trajectories']:,} in {answer['groups']:,} groups of {answer['tasks']:,} tasks",
        *(
            f"  {state:<12}{row['trajectories']:,}, {_share(row['successes'], row['trajectories'])} successful"
            for state, row in answer["states"].items()
        ),
        f"tokens        {answer['tokens']:,}, of which sampled {answer['action_tokens']:,}",
        f"success       {_share(answer['successes'], answer['trajectories'])}"
        f"   reward {_number(answer['reward_mean'], 3)}   turns {_number(answer['turns_mean'], 1)}",
        "stopped by    " + ", ".join(f"{reason} {count:,}" for reason, count in answer["stop_reasons"].items()),
        f"updates used  {drawn['fresh']:,} fresh, {drawn['replay']:,} replayed"
        f" ({drawn['trajectories_replayed']:,} different), {drawn['reserved']:,} reserved",
        f"  replayed    staleness {_number(drawn['staleness_mean'], 1)} (most {_number(drawn['staleness_max'], 0)}),"
        f" drift {_number(drawn['drift_mean'], 3)} (most {_number(drawn['drift_max'], 3)})",
    ]
    return "\n".join(lines)


_COLUMNS = "id iter task reward success turns tools tokens stop advantage uses stale state"


def _listing_text(found: Sequence[dict[str, Any]]) -> str:
    if not found:
        return "no trajectories"
    rows = [
        [
            row["id"][:12],
            str(row["iteration"]),
            row["task"][:8],
            f"{row['reward']:g}",
            "yes" if row["success"] else "no",
            str(row["num_turns"]),
            str(row["num_tool_calls"]),
            str(row["num_tokens"]),
            row["stop_reason"] + (f"/{row['error_kind']}" if row["error_kind"] else ""),
            f"{row['advantage']:+.2f}",
            str(row["uses"]),
            _number(row["staleness"], 0),
            row["state"],
        ]
        for row in found
    ]
    return _table(_COLUMNS.split(), rows)


_USE_COLUMNS = "iter slot stream share stale advantage drift most ess kl clipped"


def _uses_text(uses: Sequence[dict[str, Any]]) -> str:
    if not uses:
        return "no update used it"
    rows = [
        [
            str(use["iteration"]),
            str(use["slot"]),
            use["stream"],
            _number(use["probability"], 4),
            _number(use["staleness"], 0),
            _number(use["advantage"], 3),
            _number(use["drift_mean"], 4),
            _number(use["drift_max"], 3),
            _number(use["ess_share"], 4),
            _number(use["approx_kl"], 5),
            _number(use["clip_fraction"], 3),
        ]
        for use in uses
    ]
    return _table(_USE_COLUMNS.split(), rows)


def _print_trajectory(buffer: _Opened, answer: dict[str, Any]) -> None:
    (trajectory,) = buffer.store.read([answer["id"]])
    authors = AuthorTable.from_json(buffer.store.run(trajectory.record.run).authors)
    decoder = _tokenizer(buffer.folder)
    console = Console(highlight=False, soft_wrap=True)
    console.print(_facts_text(answer), markup=False)
    if decoder is None:
        console.print("token ids, for want of model/tokenizer.json in the run folder:", markup=False)
    for position, segment in enumerate(trajectory.segments):
        title = f"\nsegment {position} ({segment.reason}), log-probs in nats after every sampled token\n"
        console.print(title, markup=False)
        console.print(token_view(segment.tokens, authors, decoder, log_probs=True))
    console.print("every update that used it:\n" + _uses_text(answer["uses"]), markup=False)


def _facts_text(answer: dict[str, Any]) -> str:
    group = answer["group"]
    rate = _share(group["success_rate"], 1)
    success = "success" if answer["success"] else "no success"
    lines = [
        ("trajectory", answer["id"], answer["state"], f"source {answer['source']}"),
        (
            "born",
            f"iteration {answer['iteration']}",
            f"slot {answer['slot']}",
            f"policy {answer['policy_version_min']}",
        ),
        (
            "group",
            f"{group['size']} members",
            f"{rate} successful",
            f"reward {group['reward_mean']:g} on average",
        ),
        ("task", answer["task"]["hash"][:16], f"{answer['environment']} {answer['environment_version']}"),
        ("outcome", f"reward {answer['reward']:g}", success, f"advantage {answer['advantage']:+.3f}"),
        ("ended by", answer["stop_reason"], f"error: {answer['error_kind'] or 'none'}"),
        ("length", f"{answer['num_turns']} turns", f"{answer['num_tool_calls']} tool calls"),
        ("tokens", str(answer["num_tokens"]), f"{answer['num_action_tokens']} sampled"),
        (
            "sampling",
            f"temperature {answer['temperature']:g}",
            f"entropy {_number(answer['mean_entropy'], 3)} nats",
        ),
        (
            "log-probs",
            f"mean {_number(answer['mean_behavior_log_prob'], 3)}",
            f"least {_number(answer['min_behavior_log_prob'], 3)}",
        ),
    ]
    return "\n".join(f"{title:<12}" + ", ".join(facts) for title, *facts in lines)


def _tokenizer(folder: Path | None) -> TokenCodec | None:
    """The run's own tokenizer, without which tokens are shown as ids."""
    if folder is None or not (folder / "model" / "tokenizer.json").is_file():
        return None
    return TokenCodec((folder / "model" / "tokenizer.json").read_text())


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their contents; numbers to the right. Nothing is cut."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    right = [all(re.fullmatch(r"[-+0-9.e%]+", text) for text in column) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            text.rjust(width) if flush else text.ljust(width)
            for text, width, flush in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in [titles, *rows]
    ]
    return "\n".join(lines)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}".replace("%", " %") if whole else "-"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
