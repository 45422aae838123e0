"""The command `replay label`, which gives trajectories and runs labels with optional notes."""

from typing import Annotated

import typer

from agentloop.cli.options import AsJson
from agentloop.cli.replay.common import Filter, app, fail, opened, say, say_json
from agentloop.cli.text_tables import Cell, counted, row_table
from replay import questions
from replay.open_buffer import OpenBuffer, find_run
from replay.storage.labels import Labelled

_COUNTED: dict[str, Cell] = {
    "label": "label",
    "trajectories": lambda row: f"{row['trajectories']:,}",
    "runs": lambda row: f"{row['runs']:,}",
}


@app.command(epilog="Example: agentloop replay label runs/quickstart-001 3f9a21 --add good --note 'looked it up first'")
def label(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder, database file or postgresql:// URL.")],
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="ID...", help="Ids of trajectories, or their beginnings.")
    ] = None,
    filter: Filter = None,
    of_run: Annotated[
        str | None, typer.Option("--run", metavar="ID", help="Label the run of this id or name, in place of rows.")
    ] = None,
    add: Annotated[str | None, typer.Option("--add", metavar="LABEL", help="One word, or some.")] = None,
    note: Annotated[str | None, typer.Option(metavar="TEXT", help="Said with --add.")] = None,
    by: Annotated[str | None, typer.Option(metavar="WHO", help="Who says so; this user when left out.")] = None,
    remove: Annotated[
        str | None, typer.Option("--remove", metavar="LABEL", help="Take it away, with its note.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="With --where: do it; else only say to how many.")] = False,
    as_json: AsJson = False,
) -> None:
    """Label trajectories, or a run, and say why; without --add and --remove, list all labels.

    A label that is there already is said again, with the new note. Filters know `label` and `note`.
    """
    if add is None and remove is None:
        if ids or filter or of_run or note:
            fail("label must be given --add or --remove, got neither. For example: --add good")
        with opened(run) as buffer:
            answer = questions.label_counts(buffer.store, buffer.run)
        say_json(answer) if as_json else say(row_table(answer, _COUNTED) if answer else "no labels")
        return
    if add is not None and remove is not None:
        fail("label must be given --add or --remove, got both. Give one at a time.")
    if sum(map(bool, (ids, filter, of_run))) != 1:
        fail("label must be given one of ID..., --where and --run, got none or several. Name what to label.")
    done = yes or filter is None
    with opened(run, read_only=not done) as buffer:
        on: Labelled = "trajectory" if of_run is None else "run"
        chosen = _chosen(buffer, ids or [], filter, of_run)
        count = len(chosen)
        if done and add is not None:
            count = buffer.store.labels.add(chosen, add, note, by=by, on=on)
        elif done and remove is not None:
            count = buffer.store.labels.remove(chosen, remove, on=on)
    noun = "row" if of_run is None else "run"
    what = f"{counted(count, noun)} {'labelled' if remove is None else 'no longer labelled'} {add or remove}"
    text = what if done else f"{counted(count, noun)} would change\nnothing was changed; add --yes to do it"
    say_json({"label": add or remove, "on": on, "count": count, "done": done}, indent=None) if as_json else say(text)


def _chosen(buffer: OpenBuffer, ids: list[str], filter: str | None, run: str | None) -> list[str]:
    if run is not None:
        return [find_run(buffer, run)]
    if filter is None:
        return [questions.find(buffer.store, id) for id in ids]
    return questions.ids_of(buffer.store, buffer.run, filter)
