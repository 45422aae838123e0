"""The commands `replay verify | rescore | prune | compact | forget`. Nothing is removed without --yes.

Modules that need torch are imported only if a command uses a model, so that the others start at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from agentloop.cli.options import AsJson
from agentloop.cli.replay.common import Filter, Run, app, fail, opened, run_folder_of, say, say_json
from agentloop.cli.text_tables import number, table
from replay.open_buffer import OpenBuffer
from replay.questions import chosen
from replay.questions.filters import condition
from replay.storage.tombstones import ALL_RUNS, Forgotten
from replay.storage.verify import Verification

if TYPE_CHECKING:
    from agentloop.analysis.stored_log_probs import Drifted, LogProbCheck


@app.command(epilog="Example: agentloop replay verify runs/quickstart-001 --log-probs")
def verify(
    run: Run = None,
    filter: Filter = None,
    limit: Annotated[float, typer.Option(min=0, max=1, help="Share of corrupt rows from which it fails.")] = 0.01,
    log_probs: Annotated[
        bool, typer.Option("--log-probs", help="Also recompute behavior log-probs with every policy still there.")
    ] = False,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Largest difference of a recomputed log-prob, in nats.")
    ] = 0.01,
    yes: Annotated[bool, typer.Option("--yes", help="Quarantine the corrupt rows.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every row and check it against its checksums; with a model, its log-probs too.

    Exit code 1 if more than --limit of the rows are corrupt, if a name points to nothing, or if a recomputed log-prob
    is further off than --tolerance.
    """
    with opened(run, read_only=not yes) as buffer:
        found = buffer.store.verify(chosen(buffer.run, filter))
        if yes and found.corrupt:
            buffer.store.quarantine(found.corrupt)
        check = None
        if log_probs:
            check = _check_log_probs(buffer, filter, found)
    failed = found.corrupt_share > limit or bool(found.damage)
    failed = failed or (check is not None and check.worst > tolerance)
    if as_json:
        models = None if check is None else {"policies": [vars(p) for p in check.policies], "gone": check.gone}
        share = {"corrupt_share": found.corrupt_share, "quarantined": yes, "failed": failed}
        say_json({**vars(found), **share, "log_probs": models})
    else:
        say(_verification_text(found, done=yes))
        if check is not None:
            say(_check_text(check))
    raise typer.Exit(1 if failed else 0)


def _check_log_probs(buffer: OpenBuffer, filter: str | None, found: Verification) -> LogProbCheck:
    from agentloop.analysis.stored_log_probs import check_log_probs
    from agentloop.analysis.stored_policies import weights_of_run

    folder = run_folder_of(buffer)
    return check_log_probs(buffer.store, folder, weights_of_run(folder), filter=filter, skip=found.corrupt)


@app.command(epilog="Example: agentloop replay rescore --where 'staleness > 8'")
def rescore(
    run: Run = None,
    filter: Filter = None,
    policy: Annotated[
        str | None, typer.Option(metavar="VERSION|best", help="A policy version that is still there, or best.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most trajectories scored.")] = None,
    as_json: AsJson = False,
) -> None:
    """Score stored trajectories with a policy, the newest one by default: how far it has drifted from them.

    Its log-probs are stored next to the old ones, and shown by `replay show --json`.
    """
    with opened(run, read_only=False) as buffer:
        from agentloop.analysis import stored_log_probs
        from agentloop.analysis.stored_policies import named_weights

        folder = run_folder_of(buffer)
        version, weights = named_weights(folder, policy)
        drifted = stored_log_probs.rescore(buffer.store, folder, version, weights, filter=filter, limit=limit)
    say_json(vars(drifted), indent=None) if as_json else say(_drift_text(drifted))


def _verification_text(found: Verification, *, done: bool) -> str:
    states = ", ".join(f"{state} {count:,}" for state, count in found.states.items()) or "no rows"
    lines = [f"rows          {states}", f"read          {found.checked:,}, of which {len(found.corrupt):,} corrupt"]
    lines += [f"  {id}: {reason}" for id, reason in found.corrupt.items()]
    if found.corrupt:
        lines.append("quarantined" if done else "nothing was changed; add --yes to quarantine them")
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


def _drift_text(drifted: Drifted) -> str:
    return (
        f"scored  {drifted.trajectories:,} trajectories, {drifted.tokens:,} tokens, by policy {drifted.version}\n"
        f"drift   {number(drifted.drift_mean, 4)} on average, {number(drifted.token_gap_max, 3)} nats at most\n"
        f"kl      {number(drifted.approx_kl, 5)} nats per token\n"
        f"ess     {number(drifted.ess, 4)}"
    )


Yes = Annotated[bool, typer.Option("--yes", help="Do it; without it, only say what would be done.")]

_DRY = "nothing was changed; add --yes to do it"


@app.command(epilog='Example: agentloop replay prune --where "not success and staleness > 20"')
def prune(run: Run = None, filter: Filter = None, yes: Yes = False, as_json: AsJson = False) -> None:
    """Evict rows for good: what stays of them is how they ended, and every update that used them."""
    if filter is None:
        fail("prune must be given --where, got nothing. For example: agentloop replay prune --where 'iteration < 20'")
    with opened(run, read_only=not yes) as buffer:
        found = buffer.store.prune(buffer.run, rows=condition(filter), dry_run=not yes)
    what = f"{found.rows:,} rows ({found.bytes / 1e6:.1f} MB)"
    text = f"evicted {what}" if yes else f"would evict {what}\n{_DRY}"
    facts = {"rows": found.rows, "bytes": found.bytes, "done": yes}
    say_json(facts, indent=None) if as_json else say(text)


@app.command(epilog="Example: agentloop replay compact runs/quickstart-001")
def compact(run: Run = None, as_json: AsJson = False) -> None:
    """Give the disk back what evicted rows took: the database is written again, for which it needs room once more."""
    with opened(run, read_only=False) as buffer:
        before, after = buffer.store.compact()
    answer = {"bytes_before": before, "bytes_after": after}
    say_json(answer, indent=None) if as_json else say(f"{before / 1e6:,.1f} MB, now {after / 1e6:,.1f} MB")


@app.command(epilog="Example: agentloop replay forget --where \"'jane@example.org' in text\"")
def forget(
    filter: Annotated[str | None, typer.Option("--where", metavar="FILTER", help="What to forget.")] = None,
    run: Run = None,
    held_out: Annotated[
        bool,
        typer.Option(
            "--held-out", help="All that no filter knows of: episodes of evaluations, and agents' sessions under way."
        ),
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove content for good, that of rows made from it too: it is overwritten, and all is written again without it.

    Ids and how they ended stay, so that lineage still names the updates that a forgotten trajectory fed. Exit code 1 if
    the buffer still holds copies: payloads of tasks that other rows have, and rows of the same tokens.
    """
    if filter is None and not held_out:
        fail("forget must be given --where or --held-out, got neither. Name what to forget.")
    with opened(run, read_only=not yes) as buffer:
        rows = None if filter is None else chosen(buffer.run, filter)
        evaluated = (buffer.run or ALL_RUNS) if held_out else None
        found = buffer.store.forget(rows, held_out=evaluated, dry_run=not yes)
        text = _forgotten_text(found, done=yes, on_server=buffer.store.path is None)
    say_json({**vars(found), "done": yes}, indent=None) if as_json else say(text)
    raise typer.Exit(1 if yes and (found.shared_tasks or found.copies) else 0)


def _forgotten_text(found: Forgotten, *, done: bool, on_server: bool) -> str:
    what = f"the content of {found.trajectories:,} trajectories"
    what += f" ({found.derived:,} made from others of them)" if found.derived else ""
    what += f", {found.tasks:,} tasks"
    what += f", {found.held_out:,} episodes of evaluations" if found.held_out else ""
    what += f", {found.sessions:,} sessions under way" if found.sessions else ""
    left = {"payloads of tasks of others": found.shared_tasks, "trajectories with the same content": found.copies}
    stays = "left" if done else "would leave"
    lines = [f"{stays}: {len(ids):,} {kind}: {', '.join(ids[:5])}" for kind, ids in left.items() if ids]
    lines.append(f"{found.updates:,} updates used them: weights keep what they learned (agentloop replay show ID)")
    if not done:
        return "\n".join([f"would remove {what}", *lines, _DRY])
    server = ", a server's backups and archived write-ahead logs" if on_server else ""
    elsewhere = f"settings and labels of runs, and copies elsewhere (exports, reports{server})"
    return "\n".join([f"removed {what}", *lines, f"{elsewhere} are not touched"])
