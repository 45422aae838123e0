"""`agentloop replay retrain`: a run's updates once more, from a checkpoint and the recorded draws."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from agentloop.cli.replay.common import AsJson, Run, fail, opened, say
from replay.tables import table

if TYPE_CHECKING:
    from agentloop.training.retrain.retraining import Retrained


def retrain(
    first: Annotated[
        int, typer.Option("--from", metavar="ITERATION", min=0, help="The checkpoint of the run to begin from.")
    ],
    run: Run = None,
    last: Annotated[
        int | None,
        typer.Option(
            "--to",
            metavar="ITERATION",
            min=1,
            help="The last update to make; the last one whose weights the run left when left out.",
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda; the run's model.device when left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make the updates after a checkpoint again from the recorded draws: are the weights those of the run?

    Nothing is collected and nothing of the run is written. On a CPU they are equal bit by bit. Exit code 0: equal. 1:
    they differ. 2: it can't be done, as a row that an update learned from is gone, say.
    """
    with opened(run) as buffer:
        from agentloop.runs.display import open_display
        from agentloop.runs.run_folder import open_run_folder
        from agentloop.training.retrain.retraining import retrain as updates_made_again

        if buffer.folder is None:
            fail("RUN must be a run folder to be retrained, for its checkpoints are there, got a database's URL.")
        folder = open_run_folder(buffer.folder)
        with closing(open_display(stderr=True)) as display:
            found = updates_made_again(buffer.store, folder, start=first, end=last, device=device, display=display)
    say(json.dumps({**asdict(found), "equal": found.equal}) if as_json else _as_text(found))
    raise typer.Exit(0 if found.equal else 1)


def _as_text(found: Retrained) -> str:
    rows = [
        [
            str(each.iteration),
            each.stored,
            str(each.tensors),
            "equal" if each.differing == 0 else str(each.differing),
            f"{each.largest:.2e}" if each.differing else "",
        ]
        for each in found.compared
    ]
    lines = [table(["iteration", "compared with", "tensors", "differing", "largest difference"], rows)]
    said = "equal bit by bit" if found.equal else "not those of the run"
    lines += [f"weights retrained from {found.checkpoint}: {said}", *found.notes]
    return "\n".join(lines)
