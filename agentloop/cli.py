"""The front door. Heavy imports stay inside the commands, so that --help answers at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from agentloop.errors import TrainingStopped, UserError
from context import RenderError
from replay.cli import app as replay_app
from replay.errors import ReplayError

app = typer.Typer(
    name="agentloop",
    help="Experience replay for training tool-using language-model agents.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
)
app.add_typer(replay_app, name="replay")

ConfigFile = Annotated[Path, typer.Argument(help="YAML file of the run, for example configs/quickstart.yaml.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key, for example --set replay.fraction=0.5."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
RunArgument = Annotated[
    Path | None,
    typer.Argument(metavar="[RUN]", help="Run folder; the newest one under ./runs when left out."),
]


@app.command(epilog="Example: agentloop train configs/quickstart.yaml --set replay.fraction=0.5")
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the newest run of this name from its last checkpoint.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train an agent: act, remember, mix, learn."""
    from agentloop.config_file import load_config
    from agentloop.training import train as run_training

    result = run_training(load_config(config, overrides or []), resume=resume)
    if as_json:
        print(json.dumps({**vars(result), "folder": str(result.folder), "report": str(result.report)}))
    else:
        _closing_words(result.success_before, result.success_after, result.folder, result.report)
    raise typer.Exit(result.exit_code)


def _closing_words(before: float, after: float, folder: Path, report: Path) -> None:
    print(f"held-out success: {before:.1%} -> {after:.1%}".replace("%", " %"))
    print(f"run folder: {folder}   report: {report}")
    print("try next:")
    print(f"  agentloop replay stats {folder}            what is in the buffer, and what was drawn from it")
    print(f"  agentloop replay ls {folder} --failed      pick an episode, then: agentloop replay show ID {folder}")
    print("  agentloop train configs/quickstart.yaml --set replay.fraction=0.5   another mixing ratio")


@app.command(epilog="Example: agentloop evaluate runs/quickstart-001 --policy 12 --json")
def evaluate(
    run: RunArgument = None,
    policy: Annotated[
        int | None, typer.Option(help="Policy version to evaluate; the last checkpoint's when left out.")
    ] = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="Held-out tasks; as configured when left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """Held-out success of a run's policy."""
    from agentloop.evaluate_run import evaluate_run

    result = evaluate_run(run or newest_run(), policy=policy, tasks=tasks)
    if as_json:
        print(json.dumps({**vars(result), "margin": result.margin}))
    else:
        share = f"{result.success:.1%} +- {result.margin:.1%}".replace("%", " %")
        print(f"held-out success: {share} ({result.tasks} tasks, {result.mean_turns:.1f} turns each)")


@app.command(epilog="Example: agentloop config configs/quickstart.yaml --set replay.fraction=0.5")
def config(file: ConfigFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print the effective configuration, each key with its meaning."""
    from agentloop.config_file import describe_config, load_config, to_plain

    effective = load_config(file, overrides or [])
    print(json.dumps(to_plain(effective), indent=1) if as_json else describe_config(effective))


@app.command(epilog="Example: agentloop doctor --json")
def doctor(
    folder: Annotated[Path, typer.Option(help="Where runs are to be written.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Check this machine: versions, shadowed modules, GPU, disk. Exit code 1 if something can't work."""
    from agentloop.doctor import checks

    found = checks(folder)
    if as_json:
        print(json.dumps([vars(check) for check in found]))
    else:
        for check in found:
            print(f"{check.status:<5} {check.name}: {check.found}" + (f"  -> {check.advice}" if check.advice else ""))
    raise typer.Exit(1 if any(check.status == "fail" for check in found) else 0)


def newest_run() -> Path:
    from replay.cli import newest_run_folder

    return newest_run_folder()


def main() -> None:
    """Entry point: what the user can mend is one line on stderr and exit code 2; a stopped run exits 1."""
    try:
        app()
    except (UserError, ReplayError, RenderError) as error:
        print(f"agentloop: {error}", file=sys.stderr)
        sys.exit(2)
    except TrainingStopped as error:
        print(f"agentloop: training stopped: {error}", file=sys.stderr)
        sys.exit(1)
