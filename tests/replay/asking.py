"""`agentloop replay ...` as people type it."""

from __future__ import annotations

from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from replay.cli import app

WIDE = {"COLUMNS": "200", "NO_COLOR": "1"}


def ask(*arguments: str | Path) -> Result:
    """The answer of one command; whatever goes wrong is told, never raised."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env=WIDE)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result
