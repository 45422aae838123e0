"""The program `agentloop`. Heavy imports stay inside the commands, so that --help answers at once."""

import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from agentloop.cli.run_commands import app as run_app
from agentloop.distributed.torchrun import check_alone
from agentloop.errors import (
    NotJudged,
    RunStop,
    TrainingStopped,
    UserError,
    one_line,
    one_line_with_place,
    place_in_user_code,
    raise_run_stop,
)

_LATE = {
    "cluster_commands": {
        "engine": "Serve a run's policy with vLLM on this machine: started, watched, and always proved.",
        "worker": "Collect episodes for a run: claimed from its database, run on its engines, stored as they end.",
        "launch": "Start the roles of a run: learner, engines, workers, on this machine.",
        "gateway": "Let agents of any kind ask at a base URL: recorded for later runs, or as episodes of a run.",
    },
    "page_commands": {
        "inspect": "Show a buffer and its runs in a browser, live: on this machine, without a model.",
        "report": "Write a run's page as one file to send to somebody: all curves, and nothing is fetched.",
    },
    "env_commands": {"env": "Look at an environment before anything is trained on it."},
    "context_commands": {"context": "Look at chat templates."},
    "replay": {"replay": "Look into a replay buffer."},
}
"""Help texts, by module, of the commands that are imported when they are called."""


class LateCommand(TyperCommand):
    """A command whose module is imported when it is called. The program's own --help needs only its help text."""

    def loaded(self) -> Any:
        module = next(module for module, commands in _LATE.items() if self.name in commands)
        found: Any = typer.main.get_command(import_module(f"agentloop.cli.{module}").app)
        return getattr(found, "commands", {}).get(self.name, found)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self.loaded().make_context(info_name, args, parent, **extra)


class _Program(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for commands in _LATE.values():
            self.commands.update({name: LateCommand(name, help=help) for name, help in commands.items()})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Replace `~/` by the user's home, also in `--option=~/...`, which shells leave as it is."""
        return super().parse_args(ctx, [re.sub("^(--[a-z-]+=)?~/", rf"\g<1>{Path.home()}/", word) for word in args])


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
app.add_typer(run_app)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"agentloop {version('agentloop-replay')}")
        raise typer.Exit


@app.callback()
def begin(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand not in (None, "train"):
        check_alone(str(context.invoked_subcommand))


def main() -> None:
    """Run the program. Any error is one line on stderr.

    Exit code 2 means that the user can mend the error. 1 means that a run stopped, or that this program has a fault.
    Its traceback is then in a file, and the exception is the cause of the SystemExit.
    """
    before = signal.signal(signal.SIGINT, raise_run_stop)
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
        if isinstance(error, (UserError, NotJudged, *_refusal_types())):
            theirs = any(place_in_user_code(cause) for cause in _causes(error))
            _say(f"{error} The traceback: {_write_traceback(error)}" if theirs else str(error))
            sys.exit(2)
        if place is None:
            _say(
                f"agentloop must not fail by itself, got {one_line(error)}. Please report it with the traceback: "
                f"{_write_traceback(error)}"
            )
            raise SystemExit(1) from error
        found = one_line_with_place(error)
        _say(f"your own code must not raise, got {found}. Mend it. The traceback: {_write_traceback(error)}")
        raise SystemExit(2) from error
    finally:
        signal.signal(signal.SIGINT, before)


def _causes(error: BaseException) -> Iterator[BaseException]:
    while error.__cause__ is not None:
        error = error.__cause__
        yield error


def _refusal_types() -> tuple[type[Exception], ...]:
    """Exceptions of `replay` and `context` that the user can mend; imported once there is an error."""
    from context import RenderError
    from replay.errors import ReplayError

    return ReplayError, RenderError


def _say(message: str) -> None:
    from context.wording import visible_lines

    print(f"agentloop: {visible_lines(' '.join(message.split()))}", file=sys.stderr)


def _write_traceback(error: BaseException) -> str:
    """Write the whole traceback to a file, and return its name."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", errors="replace", prefix="agentloop-", suffix=".txt", delete=False
    ) as file:
        file.writelines(traceback.format_exception(error))
    return file.name
