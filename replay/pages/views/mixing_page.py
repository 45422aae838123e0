"""The page that previews the next batch of a run, by the run's settings or by others."""

import json
from typing import Any

from starlette.requests import Request

from replay import questions
from replay.config import WrongSettings, stored_config
from replay.locate import own_folder
from replay.next_batch import changed, preview
from replay.open_buffer import OpenBuffer
from replay.pages.addresses import read_parameter
from replay.pages.commands import mix_command
from replay.pages.page import Page, run_of
from replay.pages.panels import Axis, Curve, Panel, plain_groups
from replay.questions import QueryResult


def shows(source: OpenBuffer, request: Request) -> QueryResult:
    """Preview the next batch of a run, or list the runs. `set` has settings such as `fraction=0.25 max_staleness=4`."""
    run = run_of(source, request)
    if run is None:
        return {"runs": questions.runs(source.store)}
    asked = read_parameter(request, "set") or ""
    given = dict(word.partition("=")[::2] for word in asked.split())
    record = source.store.run(run)
    found: QueryResult = {"plan": None, "problem": None, "has_settings": "replay" in record.config}
    try:
        config = changed(stored_config(record), {key: _value(word) for key, word in given.items()})
        found |= preview(source.store, run, config, folder=own_folder(source.folder, run))
        points = [(each["iteration"], each["fraction"]) for each in found["schedule"]]
        panel = Panel(
            "Replay's share of the batch",
            "The configured fraction over the run. The vertical line is the next iteration.",
            [Curve("configured", points, "replay")],
            Axis(unit="share of trajectories", percent=True, whole=True),
        )
        found |= plain_groups({"Schedule": [panel]}, merged=1)
    except WrongSettings as error:
        found["problem"] = str(error)
    return {**found, "run": run, "asked": asked, "command": mix_command(source, run, given)}


def _value(word: str) -> Any:
    """Read a setting as JSON, or as a text if it is not JSON."""
    try:
        value = json.loads(word)
        # An answer can't have NaN or infinity.
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return word
    return value


PAGE = Page("/mixing", "mixing.html", shows, tab="mixing")
