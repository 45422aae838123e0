"""Arguments and options that several commands share."""

import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from agentloop.errors import UserError

_NEWEST = "newest"
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key, for example --set replay.fraction=0.5."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
RunArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN", help="Folder of a run or of sft, or RUN:best; left out: that of the newest checkpoint in ./runs."
    ),
]
PolicyOption = Annotated[
    str | None, typer.Option("--policy", metavar="NUMBER|best", help="Policy version; left out: the last checkpoint's.")
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


command_group = partial(typer.Typer, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
"""Makes an app of commands below a common word."""


class ResumingCommand(TyperCommand):
    """A command whose `--resume` needs no value, and then means the newest run. Typer's options need a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = [
            f"--resume={_NEWEST}" if word == "--resume" and following != "auto" else word
            for word, following in zip(args, [*args[1:], ""], strict=False)  # of no words there is no next one
        ]
        return super().parse_args(ctx, words)


def read_resume(resume: str | None, run: Path | None) -> bool | Literal["auto"]:
    """The value of --resume for a run. Raises UserError where --run is given, too."""
    if run is not None and resume is not None:
        raise UserError("--resume must be left out with --run, which continues that run if it has begun. Leave it out.")
    return "auto" if resume == "auto" else resume == _NEWEST


def role_printer(role: str) -> Callable[[str], None]:
    """A function that prints a line with the time and the role's name."""
    return lambda text: print(f"{time.strftime('%H:%M:%S')} {role}: {text}", flush=True)


def program() -> str:
    """The command that starts this program, also where its folder is not on the PATH."""
    return "agentloop" if shutil.which("agentloop") else os.path.relpath(Path(sys.executable).with_name("agentloop"))
