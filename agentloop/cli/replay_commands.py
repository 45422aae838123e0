"""`agentloop replay import | verify | rescore | whatif`: the commands that need more than a buffer.

What needs torch is imported when a model is asked, so that all other commands answer at once.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentloop.analysis.stored_demonstrations import write_demonstrations
from agentloop.environments import open_tasks
from context.visible import visible
from replay import queries
from replay.cli.common import AsJson, Filter, Run, fail, opened, say
from replay.cli.exchange_commands import ENDINGS, export_text, import_text, progress_line
from replay.cli.tables import number, table
from replay.exchange import ImportReport, import_file
from replay.exchange.teacher import SOURCE, import_chat, teaching_of
from replay.locate import run_identity, start_folder
from replay.queries import chosen
from replay.queries.filters import condition
from replay.queries.open_buffer import OpenBuffer
from replay.storage.verify import Verification

if TYPE_CHECKING:
    from agentloop.analysis.stored_log_probs import Drifted, LogProbCheck
    from agentloop.analysis.tool_answers import ToolCheck
    from agentloop.runs.run_folder import RunFolder


_CALLS, _SHOWN = 200, 10
"""Remembered calls that are made again, and how many of those that differ are listed."""

Policy = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="VERSION|PATH",
        help="A policy version that is still there, or a folder of weights named by its version, such as "
        "RUN/checkpoints/000012.",
    ),
]


def verify(
    run: Run = None,
    filter: Filter = None,
    limit: Annotated[float, typer.Option(min=0, max=1, help="Share of corrupt rows from which it fails.")] = 0.01,
    log_probs: Annotated[
        bool, typer.Option("--log-probs", help="Also recompute behavior log-probs with every policy still there.")
    ] = False,
    policy: Policy = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Largest difference of a recomputed log-prob, in nats.")
    ] = 0.01,
    tools: Annotated[
        bool,
        typer.Option(
            "--tools", help=f"Also make {_CALLS} remembered calls of deterministic tools again: do they answer so?"
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Quarantine the corrupt rows.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every row and check it against its hashes and numbers; with a model, its log-probs too.

    Exit code 1 if more than --limit of the rows are corrupt, if a name points to nothing, if a recomputed log-prob is
    further off than --tolerance, or if a tool answers otherwise.
    """
    with opened(run, read_only=not yes) as buffer:
        found = buffer.store.verify(chosen(buffer.run, filter))
        if yes and found.corrupt:
            buffer.store.quarantine(found.corrupt)
        check = None
        if log_probs or policy is not None:
            check = _check_log_probs(buffer, filter, found, policy)
        answers = _check_tools(buffer) if tools else None
    failed = found.corrupt_share > limit or bool(found.dangling or found.damage)
    failed = failed or (check is not None and check.worst > tolerance) or bool(answers and answers.differing)
    if as_json:
        models = None if check is None else {"policies": [vars(p) for p in check.policies], "gone": check.gone}
        share = {"corrupt_share": found.corrupt_share, "quarantined": yes, "failed": failed}
        parts = {"log_probs": models, "tools": None if answers is None else vars(answers)}
        print(json.dumps({**vars(found), **share, **parts}, indent=1))
    else:
        say(_verification_text(found, done=yes))
        if check is not None:
            say(_check_text(check))
        if answers is not None:
            say(_tools_text(answers))
    raise typer.Exit(1 if failed else 0)


def _check_log_probs(buffer: OpenBuffer, filter: str | None, found: Verification, policy: str | None) -> LogProbCheck:
    from agentloop.analysis.stored_log_probs import check_log_probs, named_weights, weights_of_run

    folder = run_folder_of(buffer)
    weights = weights_of_run(folder) if policy is None else dict([named_weights(folder, policy)])
    return check_log_probs(buffer.store, folder, weights, filter=filter, skip=found.corrupt)


def _check_tools(buffer: OpenBuffer) -> ToolCheck:
    from agentloop.analysis.tool_answers import check_tools
    from agentloop.environments import open_tasks

    folder = run_folder_of(buffer)
    environments, _ = open_tasks(folder.config, folder.environments)
    return check_tools(buffer.store, environments, folder.config, calls=_CALLS)


def rescore(
    run: Run = None,
    filter: Filter = None,
    policy: Policy = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most trajectories scored.")] = None,
    as_json: AsJson = False,
) -> None:
    """Score stored trajectories with a policy, the newest one by default: how far it has drifted from them.

    Its log-probs are stored beside the old ones, and shown by `replay show --json`.
    """
    with opened(run, read_only=False) as buffer:
        from agentloop.analysis import stored_log_probs

        folder = run_folder_of(buffer)
        version, weights = stored_log_probs.named_weights(folder, policy)
        drifted = stored_log_probs.rescore(buffer.store, folder, version, weights, filter=filter, limit=limit)
    say(json.dumps(vars(drifted)) if as_json else _drift_text(drifted))


class Format(StrEnum):
    """What a file to import holds."""

    agentloop = "agentloop"
    openai_chat = "openai-chat"


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help=f"An exported file; ends in {ENDINGS}.")],
    run: Run = None,
    form: Annotated[
        Format, typer.Option("--format", help="What FILE holds: exported rows, or one conversation a line.")
    ] = Format.agentloop,
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
    model: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Conversations: tokenizer and chat template; the run's own when left out."),
    ] = None,
    reward: Annotated[float | None, typer.Option(help="Conversations: of rows that name none.")] = None,
    advantage: Annotated[
        float | None, typer.Option(help="Conversations: of every row; from the rewards of its group when left out.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Store the rows of a file. Rows that are stored already stay as they are, so a file can be imported again.

    Every row is checked before the first is stored. With --format openai-chat, each line is a conversation
    ({"messages": [...], "tools": [...], "reward": 1.0}) and becomes the tokens that RUN's policy would have said.
    """
    if form is not Format.openai_chat and (model, reward, advantage) != (None, None, None):
        fail("--model, --reward and --advantage must come with --format openai-chat, got another format.")
    if form is Format.openai_chat and keep_source:
        fail("--keep-source must come with exported rows, got conversations, which have no source.")
    report: ImportReport
    source: str | None
    with opened(run, read_only=False) as buffer, progress_line() as show:
        learner = buffer.run or (None if buffer.folder is None else run_identity(buffer.folder).id)
        if form is Format.openai_chat:
            from agentloop.algorithms.advantages import group_advantages

            own = None if buffer.folder is None else start_folder(buffer.folder)
            teaching = teaching_of(
                buffer.store, learner, own, group_advantages, model=model, reward=reward, advantage=advantage
            )
            source = name or SOURCE
            report = import_chat(buffer.store, file, teaching, name=source, skip_bad=skip_bad, progress=show)
        else:
            source = None if keep_source else name or "import"
            report = import_file(buffer.store, file, name=source, learner=learner, skip_bad=skip_bad, progress=show)
        if report.learner is not None:
            named = [] if source is None else [source]
            report.empty_sources = queries.empty_sources(buffer.store, report.learner, named=named)
    say(json.dumps(asdict(report)) if as_json else import_text(report, file))


_MOST_ROWS = 512
"""Rows of a what-if: a few updates' batches."""


def whatif(
    run: Run = None,
    loss: Annotated[
        list[str] | None,
        typer.Option(
            "--loss",
            metavar="FILE|NAME",
            help="A YAML file of the keys to change in the run's loss, the name of an objective, or `own`; repeat it. "
            "The run's own when left out.",
        ),
    ] = None,
    policy: Policy = None,
    filter: Filter = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help=f"Most trajectories, taken evenly over their age; {_MOST_ROWS} when left out."),
    ] = None,
    iteration: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The whole batch of this iteration instead, each row in the stream it was in, by the policy that the "
            "update started from.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What each objective would have done with stored trajectories: clipping, gradient and ESS, by staleness.

    One optimizer step of every objective is computed and none is made: weights and buffer stay as they are.
    """
    if iteration is not None and limit is not None:
        fail("--iteration must be given without --limit, for its batch is looked at whole, got both.")
    with opened(run) as buffer:
        from agentloop.analysis.stored_log_probs import named_weights
        from agentloop.analysis.whatif.compared_rows import RowChoice, policy_of_iteration
        from agentloop.analysis.whatif.losses import asked_losses
        from agentloop.analysis.whatif.measure import what_if
        from agentloop.analysis.whatif.result import as_text
        from agentloop.runs.display import open_display

        folder = run_folder_of(buffer)
        losses = asked_losses(folder.config, loss or ())
        if iteration is not None and policy is None:
            policy = str(policy_of_iteration(buffer.store, folder, iteration))
        weights = named_weights(folder, policy)
        asked = RowChoice(filter, limit or _MOST_ROWS, iteration)
        with closing(open_display(stderr=True)) as display:
            found = what_if(buffer.store, folder, weights, losses=losses, asked=asked, progress=display.phase)
    say(json.dumps(found.to_json(), indent=1) if as_json else as_text(found))


def run_folder_of(buffer: OpenBuffer) -> RunFolder:
    from agentloop.runs.run_folder import open_run_folder

    if buffer.folder is None:
        fail("RUN must be a run folder where a model is asked, for its configuration is there, got a database's URL.")
    return open_run_folder(buffer.folder)


def _verification_text(found: Verification, *, done: bool) -> str:
    states = ", ".join(f"{state} {count:,}" for state, count in found.states.items()) or "no rows"
    lines = [f"rows          {states}", f"read          {found.checked:,}, of which {len(found.corrupt):,} corrupt"]
    lines += [f"  {id}: {reason}" for id, reason in found.corrupt.items()]
    if found.corrupt:
        lines.append("quarantined" if done else "nothing was changed; add --yes to quarantine them")
    lines += [f"{count:,} rows of {name} name what is not there" for name, count in found.dangling.items()]
    lines += [f"damaged: {line}" for line in found.damage]
    return "\n".join(lines)


def _check_text(check: LogProbCheck) -> str:
    rows = [
        [str(p.version), str(p.trajectories), str(p.tokens), f"{p.worst:.2e}", f"{p.mean:.2e}", p.model]
        for p in check.policies
    ]
    titles = ["policy", "trajectories", "tokens", "worst", "mean", "weights"]
    lines = [table(titles, rows)] if rows else ["no stored token was sampled by a policy whose weights are there"]
    if check.gone:
        gone = ", ".join(map(str, check.gone))
        lines.append(f"policies whose weights are gone: {gone} (checkpoint.keep_policies keeps more)")
    return "\n".join(lines)


def _tools_text(check: ToolCheck) -> str:
    if not check.calls:
        return "tools         no call is remembered that could be made again"
    lines = [f"tools         {check.calls:,} remembered calls made again, {len(check.differing):,} answered otherwise"]
    if check.differing:
        lines += [*(f"  {visible(line)}" for line in check.differing[:_SHOWN]), "The environment is not deterministic."]
    return "\n".join(lines)


def _drift_text(drifted: Drifted) -> str:
    facts: dict[str, Any] = {
        "scored": f"{drifted.trajectories:,} trajectories, {drifted.tokens:,} tokens, by policy {drifted.version}",
        "drift": f"{number(drifted.drift_mean, 4)} on average, {number(drifted.drift_max, 3)} at most",
        "kl": f"{number(drifted.approx_kl, 5)} nats per token",
        "ess": number(drifted.ess, 4),
    }
    return "\n".join(f"{name:<8}{value}" for name, value in facts.items())


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
