"""All runs of a folder in one list, and the curves of those that are marked in the same charts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from replay.inspector.server.page_views import Page
from replay.inspector.server.query_string import BadQuery, QueryString, address
from replay.queries import QueryResult
from replay.queries.runs import Series, merged_to
from replay.report.panel_json import plain_panel
from replay.report.panels import Panel
from replay.report.svg import Axis, Curve

if TYPE_CHECKING:
    from replay.inspector.opened_runs import OpenedRuns

_COLOURS = 7
MOST = 2 * _COLOURS
"""Runs in one chart: each colour once as a whole and once as a dashed line."""
_AT_FIRST = _COLOURS
"""Runs that are shown where none is marked."""
_METRICS = ("eval/success", "rollout/reward", "batch/fresh", "batch/replay")


def answer(source: OpenedRuns, query: QueryString) -> QueryResult:
    """`runs`, each with the `key` that marks it; `shown`: the keys of those whose curves are in the `panels`."""
    lines = [{**line, "key": _key(line)} for line in source.lines()]
    shown = _shown(lines, query.texts("show"))
    merged = merged_to(max((line["iteration"] for line in shown), default=1))
    series = [source.curves(line, _METRICS, merged) for line in shown]
    return {
        "run": None,
        "runs": lines,
        "shown": [line["key"] for line in shown],
        "merged": merged,
        "panels": [plain_panel(panel, merged=merged) for panel in _panels(_names(shown), series)] if shown else [],
    }


def _key(line: Mapping[str, Any]) -> str:
    return f"{line['folder']}:{line['run']}"


def _shown(lines: Sequence[QueryResult], marked: Sequence[str]) -> list[QueryResult]:
    if len(set(marked)) > MOST:
        raise BadQuery(f"show must be given at most {MOST} times, got {len(set(marked))}. Mark fewer runs.")
    known = {line["key"]: line for line in lines if line["problem"] is None}
    unknown = [key for key in marked if key not in known]
    if unknown:
        raise BadQuery(f"show must name runs of the list, as FOLDER:ID, got {unknown[0]!r}. Mark them there.")
    trained = [line for line in known.values() if line["iteration"]]
    return [known[key] for key in dict.fromkeys(marked)] or trained[:_AT_FIRST]


def _names(lines: Sequence[QueryResult]) -> list[str]:
    """What tells each apart: runs of several folders may have one name, and a folder several runs."""
    times = Counter(line["folder"] for line in lines)
    return [line["folder"] if times[line["folder"]] == 1 else f"{line['folder']} {line['name']}" for line in lines]


def _panels(names: Sequence[str], series: Sequence[Series]) -> list[Panel]:
    def curves(of: Sequence[Sequence[tuple[int, float]]]) -> tuple[Curve, ...]:
        looks = (_look(at) for at in range(len(names)))
        return tuple(
            Curve(name, points, role, dashed=dashed)
            for name, points, (role, dashed) in zip(names, of, looks, strict=True)
        )

    success, reward = ([found.get(name, []) for found in series] for name in _METRICS[:2])
    return [
        Panel(
            "Held-out success",
            "Share of held-out episodes that succeed: what runs are compared by.",
            curves(success),
            Axis("share of episodes", percent=True, whole=True),
        ),
        Panel(
            "Reward",
            "Mean reward of fresh episodes. Runs with other rewards do not compare.",
            curves(reward),
            Axis("reward per episode", from_zero=True),
        ),
        Panel(
            "Replayed share",
            "Share of each batch that came from the buffer.",
            curves([_replayed_share(found) for found in series]),
            Axis("share of trajectories", percent=True, whole=True),
        ),
    ]


def _look(at: int) -> tuple[str, bool]:
    return f"s{at % _COLOURS}", at >= _COLOURS


def _replayed_share(found: Series) -> list[tuple[int, float]]:
    fresh, replay = dict(found.get("batch/fresh", ())), dict(found.get("batch/replay", ()))
    return [(at, replay[at] / (fresh[at] + replay[at])) for at in fresh if at in replay and fresh[at] + replay[at] > 0]


def shows(source: OpenedRuns, query: QueryString, found: QueryResult) -> dict[str, Any]:
    places = {key: at for at, key in enumerate(found["shown"])}
    return {
        "charts": {panel["key"]: panel for panel in found["panels"]},
        "looks": {key: _look(at) for key, at in places.items()},
        "links": {
            line["key"]: address("in", line["folder"], "runs", line["run"])
            for line in found["runs"]
            if line["problem"] is None
        },
        "most": MOST,
        "folder": str(source.folder),
    }


PAGE: Page[OpenedRuns] = Page("/", "all_runs.html", answer, tab="runs", shows=shows)
