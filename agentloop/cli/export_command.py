"""`agentloop export RUN --to FOLDER`: a trained policy that plain transformers loads."""

from __future__ import annotations

from typing import Annotated

import typer

from agentloop.analysis.exported_model import export_run
from agentloop.analysis.stored_policies import newest_trained_folder
from agentloop.cli.main import RunArgument

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog="Example: agentloop export runs/quickstart-001 --to my-agent")
def export(
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="FOLDER|hf:ID", help="A new folder, or a name on a hub (HF_ENDPOINT names another one)."
        ),
    ],
    run: RunArgument = None,
    policy: Annotated[
        int | None, typer.Option(help="Policy version to export; the last checkpoint's when left out.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="On a hub: nobody else sees it.")] = False,
) -> None:
    """Write a trained policy as a folder that transformers loads, or upload it: weights and model card."""
    print(f"exported to {export_run(run or newest_trained_folder(), to, policy=policy, private=private)}")
