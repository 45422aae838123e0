"""The next batch of a run, by its own settings or by some that are tried: what the batch would be made of."""

import json
from typing import Any

from starlette.requests import Request

from replay import questions
from replay.config import stored_config
from replay.locate import own_folder
from replay.next_batch import WrongSettings, changed, preview
from replay.open_buffer import OpenBuffer
from replay.pages.addresses import text
from replay.pages.commands import mix_command
from replay.pages.page import Page, run_of
from replay.questions import QueryResult


def shows(source: OpenBuffer, request: Request) -> QueryResult:
    """Without a run, where the database has several, only their list. `set`: as `fraction=0.25 max_staleness=4`."""
    run = run_of(source, request)
    if run is None:
        return {"runs": questions.runs(source.store)}
    asked = text(request, "set") or ""
    given = dict(word.partition("=")[::2] for word in asked.split())
    found: QueryResult = {"plan": None, "problem": None}
    try:
        config = changed(stored_config(source.store.run(run)), {key: _value(word) for key, word in given.items()})
        found |= preview(source.store, run, config, folder=own_folder(source.folder, run))
    except WrongSettings as error:
        found["problem"] = str(error)
    return {**found, "run": run, "asked": asked, "command": mix_command(source, run, given)}


def _value(word: str) -> Any:
    """A JSON value; what is none is a text."""
    try:
        value = json.loads(word)
        # NaN, and numbers that can't be distinguished from infinity, can't be part of an answer.
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return word
    return value


PAGE = Page("/mixing", "mixing.html", shows, tab="mixing")
