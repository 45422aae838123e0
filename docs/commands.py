"""Writes docs/commands.md: `python -m docs.commands > docs/commands.md`.

The page is what `--help` of every command prints, at one width and without colours.
"""

from __future__ import annotations

from collections.abc import Iterator

import typer
from typer.core import TyperCommand, TyperGroup

from agentloop.cli.main import LateCommand, app

WIDTH = 110
"""Columns of the help texts, whatever the terminal of the person who writes the page has."""
HEAD = """\
# Commands

What `--help` of each command prints. `python -m docs.commands > docs/commands.md` writes this page.

The `replay` commands only read, also while a run is going on, but for `import`, `rescore`, and `prune`,
`forget` and `verify` with `--yes`. Exit codes are in [errors.md](errors.md#exit-codes).
"""


def page() -> str:
    root = typer.main.get_command(app)
    return "\n".join([HEAD, *(_section(command, path) for path, command in _commands(root, "agentloop"))])


def _commands(command: TyperCommand | TyperGroup, path: str) -> Iterator[tuple[str, TyperCommand | TyperGroup]]:
    """Every command with what is typed to call it; a group comes before its own commands."""
    if isinstance(command, LateCommand):
        command = command.loaded()
    yield path, command
    if isinstance(command, TyperGroup):
        for name, inner in command.commands.items():
            yield from _commands(inner, f"{path} {name}")


def _section(command: TyperCommand | TyperGroup, path: str) -> str:
    context = typer.Context(command, info_name=path, terminal_width=WIDTH, max_content_width=WIDTH, color=False)
    return f"## {path}\n\n<!-- not run: what --help prints -->\n```\n{command.get_help(context)}\n```\n"


if __name__ == "__main__":
    print(page(), end="")
