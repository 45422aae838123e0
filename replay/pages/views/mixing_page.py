"""The next batch of a run under settings that are chosen here: what it would be made of."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from replay import questions
from replay.config import stored_config
from replay.locate import own_folder
from replay.pages.page import Page, run_of
from replay.questions import QueryResult
from replay.questions.open_buffer import OpenBuffer
from replay.questions.preview import CONTROLS, WrongSettings, changed, options_of, shown
from replay.sampling.samplers import SAMPLERS

_MAY_BE_EMPTY = ("task_members", "max_staleness", "max_uses")


def shows(source: OpenBuffer, request: Request) -> QueryResult:
    """Without a run, where the database has several, only their list."""
    run = run_of(source, request)
    if run is None:
        return {"runs": questions.runs(source.store)}
    asked = dict(request.query_params)
    given = {name: value for name, value in asked.items() if value or name in _MAY_BE_EMPTY or "." in name}
    stored = stored_config(source.store.run(run))
    own, errors = shown(stored.replay), {}
    found: QueryResult = {"settings": own, "plan": None}
    try:
        folder = own_folder(source.folder, run)
        found = questions.preview(source.store, run, changed(stored, given), folder=folder)
    except WrongSettings as error:
        errors = dict(error.errors)
    settings = found["settings"]
    return {
        **found,
        "run": run,
        "errors": errors,
        "asked": asked,
        "text": _text,
        "fields": {name: asked.get(name, _text(settings[name])) for name in CONTROLS},
        "own": {name: _text(own[name]) for name in CONTROLS},
        "samplers": {name: options_of(name) for name in SAMPLERS},
        "command": _command(source, run, settings, own),
    }


def _text(value: Any) -> str:
    """A setting as it is typed: a text as it is, and other values as JSON; nothing for none."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def _command(source: OpenBuffer, run: str, settings: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """The command that asks this in a terminal, with what is other than the run's own."""
    words = ["agentloop", "replay", "mix", *source.words_of(run)]
    for name, value in settings.items():
        if value != own[name]:
            words += ["--set", f"replay.{name}={_text(value) or 'null'}"]
    return shlex.join(words)


PAGE = Page("/mixing", "mixing.html", shows, tab="mixing")
