"""The forms of the inspector, which write labels on trajectories and runs, and saved views of the list."""

from collections.abc import Mapping, Sequence
from functools import partial
from urllib.parse import parse_qs

from starlette.requests import Request

from replay.open_buffer import OpenBuffer
from replay.pages.addresses import address, read_path_part
from replay.pages.page import Action
from replay.questions import QueryResult
from replay.storage.labels import Labelled, this_user

VIEW_PARAMETERS = ("run", "sort", "order", "limit", "where")
"""Parameters of the list's address that a saved view holds."""
Form = Mapping[str, str]


def view_address(query: str) -> str:
    """Return the address of a saved view. Unknown parameters are dropped, because anybody may have saved the view."""
    given = parse_qs(query)
    return address("buffer", **{name: given.get(name) for name in VIEW_PARAMETERS})


def form_of(source: OpenBuffer) -> QueryResult:
    """Return whether labels and views can be changed (`writes`), and the name that forms suggest (`by`)."""
    return {"writes": source.location is not None, "by": this_user()}


def label_form(source: OpenBuffer, labels: Sequence[QueryResult], *place: str) -> QueryResult:
    """Return the labels of the page at this address, and the address that changes them."""
    return {**form_of(source), "labels": labels, "action": address(*place, "labels")}


def _change_label(place: str, on: Labelled, source: OpenBuffer, request: Request, form: Form) -> str:
    id = read_path_part(request, "id")
    with source.writing() as store:
        if "remove" in form:
            store.labels.remove([id], form["remove"], on=on)
        else:
            label = form.get("label", "").strip()
            store.labels.add([id], label, form.get("note", "").strip() or None, by=form.get("by"), on=on)
    return address(place, id) + "#labels"


def _change_view(source: OpenBuffer, request: Request, form: Form) -> str:
    """Save the list under a name, or remove a saved view."""
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
