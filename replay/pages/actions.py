"""What people may write while they look: labels on trajectories and runs, and lists by name."""

from collections.abc import Mapping, Sequence
from functools import partial
from urllib.parse import parse_qs

from starlette.requests import Request

from replay.open_buffer import OpenBuffer
from replay.pages.addresses import address, in_path
from replay.pages.page import Action
from replay.questions import QueryResult
from replay.storage.labels import Labelled, this_user

VIEW_PARAMETERS = ("run", "sort", "order", "limit", "where")
"""Of the list's address: what a saved view holds."""
Form = Mapping[str, str]


def view_address(query: str) -> str:
    """The list of a saved view, whatever was saved as one."""
    given = parse_qs(query)
    return address("buffer", **{name: given.get(name) for name in VIEW_PARAMETERS})


def form_of(source: OpenBuffer) -> QueryResult:
    """Whether labels and views can be changed, and who does unless somebody else says so."""
    return {"writes": source.location is not None, "by": this_user()}


def label_form(source: OpenBuffer, labels: Sequence[QueryResult], *place: str) -> QueryResult:
    """The labels of what has this address, and where they are changed."""
    return {**form_of(source), "labels": labels, "action": address(*place, "labels")}


def _change_label(place: str, on: Labelled, source: OpenBuffer, request: Request, form: Form) -> str:
    id = in_path(request, "id")
    with source.writing() as store:
        if "remove" in form:
            store.labels.remove([id], form["remove"], on=on)
        else:
            label = form.get("label", "").strip()
            store.labels.add([id], label, form.get("note", "").strip() or None, by=form.get("by"), on=on)
    return address(place, id) + "#labels"


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
    Action("/trajectories/{id}/labels", partial(_change_label, "trajectories", "trajectory")),
    Action("/runs/{id}/labels", partial(_change_label, "runs", "run")),
    Action("/views", _change_view),
)
