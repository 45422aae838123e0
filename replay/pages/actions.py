"""The forms of the inspector, which write labels on trajectories and runs."""

from collections.abc import Mapping, Sequence
from functools import partial

from starlette.requests import Request

from replay.open_buffer import OpenBuffer
from replay.pages.addresses import address, read_path_part
from replay.pages.page import Action
from replay.questions import QueryResult
from replay.storage.labels import Labelled, this_user

Form = Mapping[str, str]


def label_form(source: OpenBuffer, labels: Sequence[QueryResult], *place: str) -> QueryResult:
    """Return the labels of the page at this address, the address that changes them, whether they can be changed
    (`writes`), and the name that the form suggests (`by`)."""
    action, writes = address(*place, "labels"), source.location is not None
    return {"labels": labels, "action": action, "writes": writes, "by": this_user()}


def _change_label(place: str, on: Labelled, source: OpenBuffer, request: Request, form: Form) -> str:
    id = read_path_part(request, "id")
    with source.writing() as store:
        if "remove" in form:
            store.labels.remove([id], form["remove"], on=on)
        else:
            label = form.get("label", "").strip()
            store.labels.add([id], label, form.get("note", "").strip() or None, by=form.get("by"), on=on)
    return address(place, id) + "#labels"


ACTIONS = (
    Action("/trajectories/{id}/labels", partial(_change_label, "trajectories", "trajectory")),
    Action("/runs/{id}/labels", partial(_change_label, "runs", "run")),
)
