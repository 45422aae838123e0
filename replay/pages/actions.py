"""What people may write while they look: labels on trajectories and runs, and lists by name."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import parse_qs

from starlette.requests import Request

from replay.pages.addresses import address, in_path
from replay.pages.page import Action
from replay.questions.open_buffer import OpenBuffer
from replay.storage.labels import Labelled

VIEW_PARAMETERS = ("run", "sort", "order", "limit", "where")
"""Of the list's address: what a saved view holds."""
Form = Mapping[str, str]


def view_address(query: str) -> str:
    """The list of a saved view, whatever was saved as one."""
    given = parse_qs(query)
    return address("buffer", **{name: given.get(name) for name in VIEW_PARAMETERS})


def _label_trajectory(source: OpenBuffer, request: Request, form: Form) -> str:
    id = in_path(request, "id")
    _change(source, id, "trajectory", form)
    return address("trajectories", id) + "#labels"


def _label_run(source: OpenBuffer, request: Request, form: Form) -> str:
    id = in_path(request, "run")
    _change(source, id, "run", form)
    return address("runs", id) + "#labels"


def _change(source: OpenBuffer, id: str, on: Labelled, form: Form) -> None:
    with source.writing() as store:
        if "remove" in form:
            store.labels.remove([id], form["remove"], on=on)
        else:
            label = form.get("label", "").strip()
            store.labels.add([id], label, form.get("note", "").strip() or None, by=form.get("by"), on=on)


def _change_view(source: OpenBuffer, request: Request, form: Form) -> str:
    """Save the list as it is, or take a saved one away."""
    query = form.get("query", "")
    with source.writing() as store:
        if "remove" in form:
            store.labels.remove_view(form["remove"])
        else:
            store.labels.save_view(form.get("name", "").strip(), query, by=form.get("by"))
    return view_address(query)


ACTIONS = (
    Action("/trajectories/{id}/labels", _label_trajectory),
    Action("/runs/{run}/labels", _label_run),
    Action("/views", _change_view),
)
