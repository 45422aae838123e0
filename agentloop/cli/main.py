"""The front door. Heavy imports stay inside the commands, so that --help answers at once."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import closing
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from agentloop.distributed.torchrun import check_alone, own_rank
from agentloop.errors import RunStop, TrainingStopped, UserError, one_line, one_line_with_place, place_in_user_code

if TYPE_CHECKING:
    from agentloop.config import RunConfig
    from agentloop.training.from_python.train_result import TrainResult


class LateCommand(TyperCommand):
    """A command of another module, which is imported when one is called: the program's --help needs only `help`."""

    def loaded(self) -> Any:
        if self.name in _ALONE:
            return typer.main.get_command(import_module(f"agentloop.cli.{_ALONE[self.name]}").app)
        from agentloop.cli.buffer_commands import app as late

        command: Any = typer.main.get_command(late)
        return command.commands[self.name]

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self.loaded().make_context(info_name, args, parent, **extra)


class ResumingCommand(TyperCommand):
    """A command whose `--resume` may stand alone, which means the newest run. In Typer, options always have a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = [
            f"--resume={NEWEST}" if word == "--resume" and following != "auto" else word
            for word, following in zip(args, [*args[1:], ""], strict=True)
        ]
        return super().parse_args(ctx, words)


class _Program(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands.update({name: LateCommand(name, help=help) for name, help in _LATE.items()})


NEWEST = "newest"
_ALONE = {
    "engine": "roles.engine_command",
    "worker": "roles.worker_command",
    "launch": "roles.launch_command",
    "export": "export_command",
}
"""Each with a module of its own."""
_LATE = {
    "engine": "Serve a run's policy with vLLM on this machine: started, watched, started again, and always proved.",
    "worker": "Collect episodes for a run: claimed from its database, run on its engines, stored as they end.",
    "launch": "Start the roles of a run: learner, engines, workers, on this machine or on Ray.",
    "export": "Write a trained policy as a folder that transformers loads, or upload it: weights and model card.",
    "inspect": "Show a buffer and its runs in a browser, live: read-only, on this machine, without a model.",
    "report": "Write a run's page as one file to send to somebody: all curves, and nothing is fetched.",
    "env": "Look at an environment before anything is trained on it.",
    "context": "Look at chat templates and conversations, token by token.",
    "replay": "Look into a replay buffer.",
}
app = typer.Typer(
    name="agentloop",
    cls=_Program,
    help="Experience replay for training tool-using language-model agents.",
    epilog="Example: agentloop train configs/quickstart.yaml, then: agentloop replay stats",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
)


def _say_version(asked: bool) -> None:
    if asked:
        print(f"agentloop {version('agentloop-replay')}")
        raise typer.Exit


@app.callback()
def begin(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand not in (None, "train"):
        check_alone(str(context.invoked_subcommand))


ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key, for example --set replay.fraction=0.5."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
RunArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN", help="Folder of a run or of sft; the one under ./runs with the newest checkpoint when left out."
    ),
]
EnvironmentChanged = Annotated[
    bool,
    typer.Option("--environment-changed", help="Go on although the environment's source is not what it was."),
]
Resume = Annotated[
    Literal["newest", "auto"] | None,
    typer.Option(
        metavar="[auto]",
        help="Continue the run in the folder CONFIG, or the newest of the configuration's name, from its last "
        "checkpoint; auto: or begin one.",
    ),
]
RunPlace = Annotated[
    Path | None,
    typer.Option(metavar="RUN", help="Folder of the run, to begin it there or to continue it if it has begun."),
]


def check_one_run(run: Path | None, resume: str | None) -> None:
    """Raises UserError where both options say which run is meant."""
    if run is not None and resume is not None:
        raise UserError("--resume must be left out with --run, which continues that run if it has begun. Leave it out.")


@app.command(cls=ResumingCommand, epilog="Example: agentloop train configs/quickstart.yaml --set replay.fraction=0.5")
def train(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG",
            help="YAML file of the run, or `quickstart`, which is built in; with --resume also the folder of a run.",
        ),
    ],
    overrides: Overrides = None,
    resume: Resume = None,
    run: RunPlace = None,
    environment_changed: EnvironmentChanged = False,
    trace_step: Annotated[
        bool, typer.Option("--trace-step", help="Print the data flow of the next iteration: every role's outputs.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train an agent: act, remember, mix, learn."""
    settings = _settings("train", config, overrides or [], resume is not None and run is None)
    # After the configuration: they load torch, and a mistake in it is told at once.
    from agentloop.runs.display import open_display
    from agentloop.training.train import train as run_training
    from agentloop.training.train import train_worker

    if own_rank():
        train_worker(settings)
        return
    check_one_run(run, resume)
    with closing(open_display(stderr=as_json)) as display:
        result = run_training(
            settings,
            resume="auto" if resume == "auto" else resume == NEWEST,
            run=config if config.is_dir() else run,
            environment_changed=environment_changed,
            trace=trace_step,
            display=display,
        )
    if as_json:
        paths = {name: str(getattr(result, name)) for name in ("folder", "model", "report")}
        print(json.dumps({**vars(result), **paths}))
    else:
        _closing_words(result, _with_other_mix(config, overrides or [], settings), settings.run.iterations)
    raise typer.Exit(result.exit_code)


def _settings(command: str, config: Path, overrides: Sequence[str], resume: bool) -> RunConfig:
    """The configuration in a file; of a run's folder, the run's own, to go on with."""
    from agentloop.config.config_file import load_config
    from agentloop.runs.run_folder import config_to_resume

    if not config.is_dir():
        return load_config(config, overrides)
    if not resume:
        alone = ", and without --run" if command == "train" else ""
        raise UserError(
            f"CONFIG must be a YAML file but with --resume{alone}, got the folder {str(config)!r}. To go on with the "
            f"run in it: {shlex.join([_program(), command, str(config), '--resume'])}"
        )
    return config_to_resume(config, overrides)


def _with_other_mix(config: Path, overrides: Sequence[str], settings: RunConfig) -> list[str] | None:
    """The command of a run with another share of replay; None where this one was begun by another command."""
    if config.is_dir():
        return None
    sets = [*overrides, f"replay.fraction={0.25 if settings.replay.fraction == 0.5 else 0.5}"]
    return [_program(), "train", str(config), *(word for setting in sets for word in ("--set", setting))]


def _closing_words(result: TrainResult, with_other_mix: Sequence[str] | None, iterations: int) -> None:
    from agentloop.runs.display import percent

    print(f"held-out success: {percent(result.success_before)} -> {percent(result.success_after)}")
    print(f"trained model: {result.model}")
    print(f"run folder: {result.folder}   report: {result.report}")
    replay = shlex.join([_program(), "replay"])
    folder = shlex.quote(str(result.folder))
    hints = [
        (f"{replay} stats {folder}", "what is in the buffer, and what was drawn from it"),
        (f"{replay} ls {folder} --failed", f"pick one, then: {replay} show ID {folder}"),
    ]
    if result.exit_code:
        print(f"stopped after iteration {result.iterations} of {iterations}")
        hints.append((shlex.join([_program(), "train", str(result.folder), "--resume"]), "go on from here"))
    elif with_other_mix is not None:
        hints.append((shlex.join(with_other_mix), "another mixing ratio"))
    print("try next:")
    width = max(len(words) for words, _ in hints[:2])  # the last one can be long
    for words, meaning in hints:
        print(f"  {words:<{width}}  # {meaning}")


def _program() -> str:
    """What to type to start this program again, where its folder is not on the PATH too."""
    return "agentloop" if shutil.which("agentloop") else sys.argv[0]


@app.command(
    epilog="Example: agentloop evaluate runs/quickstart-001 --samples 8, or: agentloop evaluate --policy 12 --json"
)
def evaluate(
    run: RunArgument = None,
    policy: Annotated[
        int | None, typer.Option(help="Policy version to evaluate; the last checkpoint's when left out.")
    ] = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="Held-out tasks; as configured when left out.")] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Episodes on each task, for pass@k up to that k; as configured when left out."),
    ] = None,
    environment_changed: EnvironmentChanged = False,
    as_json: AsJson = False,
) -> None:
    """Held-out success of a run's policy: pass@k, turns and stop reasons with 95 % confidence intervals."""
    from agentloop.analysis.stored_policies import evaluate_run, newest_trained_folder
    from agentloop.rollouts.evaluation import as_table

    found = evaluate_run(
        run or newest_trained_folder(),
        policy=policy,
        tasks=tasks,
        samples=samples,
        environment_changed=environment_changed,
    )
    print(json.dumps(found.to_json()) if as_json else as_table(found))


@app.command(
    epilog="Example: agentloop sft configs/model.yaml --set model.path=PATH --set sft.data=demonstrations.jsonl"
)
def sft(
    config: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", help="YAML file of the run; with --resume also the folder of a training."),
    ],
    overrides: Overrides = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the training in the folder CONFIG, or the newest of the configuration's name, from its last "
            "checkpoint.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model on demonstrations of your own, to go on from with train."""
    settings = _settings("sft", config, overrides or [], resume)
    from agentloop.runs.display import open_display
    from agentloop.supervised.sft import sft as train_supervised

    with closing(open_display(stderr=as_json)) as display:
        result = train_supervised(settings, resume=config if config.is_dir() else resume, display=display)
    if as_json:
        print(json.dumps({**vars(result), "folder": str(result.folder), "model": str(result.model)}))
    else:
        print(f"held-out loss: {result.held_out_before:.4f} -> {result.held_out_after:.4f}")
        resumed = shlex.join([_program(), "sft", str(result.folder), "--resume"])
        print(f"folder: {result.folder}")
        print(f"go on with: {resumed if result.exit_code else f'--set model.path={result.model}'}")
    raise typer.Exit(result.exit_code)


@app.command(epilog="Example: agentloop config configs/quickstart.yaml --set replay.fraction=0.5")
def config(file: ConfigFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print the effective configuration, each key with its meaning."""
    from agentloop.config.config_file import describe_config, load_config, to_plain

    effective = load_config(file, overrides or [])
    print(json.dumps(to_plain(effective), indent=1) if as_json else describe_config(effective))


@app.command(epilog="Example: agentloop doctor --json")
def doctor(
    folder: Annotated[Path, typer.Option(help="Where runs are to be written.")] = Path("runs"),
    engine: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Also check the vLLM server there, whose key is in AGENTLOOP_ENGINE_KEY."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine: SQLite, shadowed modules, GPU, disk. Exit code 1 if something can't work."""
    from agentloop.analysis.doctor import check_engine, checks

    found = checks(folder)
    if engine is not None:
        found.append(check_engine(engine, os.environ.get("AGENTLOOP_ENGINE_KEY")))
    if as_json:
        print(json.dumps([vars(check) for check in found]))
    else:
        for check in found:
            print(f"{check.status:<5} {check.name}: {check.found}" + (f"  -> {check.advice}" if check.advice else ""))
    raise typer.Exit(1 if any(check.status == "fail" for check in found) else 0)


def main() -> None:
    """Entry point: whatever goes wrong is one line on stderr.

    Exit code 2: the user can mend it. 1: a run stopped, or this program has a mistake, whose traceback is in a file;
    the exception is then the cause of the SystemExit.
    """
    before = signal.signal(signal.SIGINT, _stop)
    try:
        app()
    except RunStop:
        raise
    except MemoryError as error:
        _say(f"memory must suffice, got {str(error) or 'none left'}. Stop other programs or do less at once.")
        sys.exit(2)
    except TrainingStopped as error:
        _say(f"training stopped: {error}")
        sys.exit(1)
    except BaseException as error:
        place = place_in_user_code(error)
        if isinstance(error, (SystemExit, KeyboardInterrupt)) and place is None:
            raise  # how a command ends
        if isinstance(error, (UserError, *_refusals())):
            theirs = any(place_in_user_code(cause) for cause in _causes(error))
            _say(f"{error} The traceback: {_written_down(error)}" if theirs else str(error))
            sys.exit(2)
        if place is None:
            _say(
                f"agentloop must not fail by itself, got {one_line(error)}. Please report it with the traceback: "
                f"{_written_down(error)}"
            )
            raise SystemExit(1) from error
        found = one_line_with_place(error)
        _say(f"your own code must not raise, got {found}. Mend it. The traceback: {_written_down(error)}")
        raise SystemExit(2) from error
    finally:
        signal.signal(signal.SIGINT, before)


def _stop(number: int, frame: FrameType | None) -> None:
    """Ctrl-C, which is told from a KeyboardInterrupt that somebody's code raises."""
    raise RunStop(128 + number)


def _causes(error: BaseException) -> Iterator[BaseException]:
    while error.__cause__ is not None:
        error = error.__cause__
        yield error


def _refusals() -> tuple[type[Exception], ...]:
    """What `replay` and `context` refuse; imported once there is an error."""
    from context import PrefixError, RenderError
    from replay.errors import ReplayError

    return ReplayError, RenderError, PrefixError


def _say(message: str) -> None:
    from context.wording import visible_lines

    print(f"agentloop: {visible_lines(' '.join(message.split()))}", file=sys.stderr)


def _written_down(error: BaseException) -> str:
    """The file that has the whole traceback now."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", errors="replace", prefix="agentloop-", suffix=".txt", delete=False
    ) as file:
        file.writelines(traceback.format_exception(error))
    return file.name
