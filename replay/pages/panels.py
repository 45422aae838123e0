"""The charts of one or several runs as data: panels of curves over iterations. `panels.yaml` lists the panels."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml

from replay.questions.runs import STOPS, Metrics, Series, finite, wilson_bounds
from replay.records import WHOLE_ENDS
from replay.records import stored_setting as stored
from replay.storage.staleness import ESS_BY_AGE, age_order

Config = Mapping[str, Any]
"""The stored configuration of a run."""
COLOURS = 7
"""Number of colours for curves of one kind: the roles `s0` to `s6`."""


@dataclass(frozen=True)
class Curve:
    """A line of a chart, or a layer of its bars."""

    label: str
    points: Series
    role: str
    """The name of the colour in `static/style.css`: `fresh`, `replay`, `held-out`, `ink`, `s0` .. `s6`."""
    dashed: bool = False
    marker: Literal["circle", "square"] = "circle"
    band: Sequence[tuple[int, float, float]] = ()
    """(iteration, low, high) of the 95 % interval, which is shaded."""


@dataclass(frozen=True)
class Axis:
    """The vertical axis of a panel. The horizontal axis counts iterations."""

    unit: str = ""
    percent: bool = False
    """Whether values are shares, shown in percent."""
    whole: bool = False
    """Whether the axis always goes from 0 to 1, so that runs can be compared at a glance."""
    from_zero: bool = False
    reference: float | None = None
    """The value of a thin horizontal line: a limit, or the value that means that nothing happened."""
    least_span: float = 0.0
    """The smallest range of the axis, so that rounding noise does not look like a signal."""
    log_if_wide: bool = False
    """Whether the axis is logarithmic if the values span more than a factor of 10."""


@dataclass(frozen=True)
class Panel:
    """A chart with its title and a sentence on how to read it."""

    title: str
    how: str
    """The sentence on how to read the chart."""
    curves: Sequence[Curve]
    """The curves. Those without a point are listed as not measured."""
    axis: Axis = Axis()
    kind: Literal["lines", "bars"] = "lines"
    steps: Curve | None = None
    """A stepped line over the bars."""


PanelGroups = Mapping[str, Sequence[Panel]]
"""Panels by the question that they answer, in reading order."""


def number(value: float, *, percent: bool = False) -> str:
    """Write a value with three significant digits. A share is written as 100 % only if it is exactly that."""
    if percent:
        rounded = f"{100 * value:.3g}"
        return f"{100 * value:.5g} %" if rounded == "100" else f"{rounded} %"
    if abs(value) < 1e-12:
        return "0"  # an error of rounding
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def plain_groups(groups: PanelGroups, *, merged: int, replayed: bool = False) -> dict[str, Any]:
    """Return the panels as plain values, in groups (`groups`) and by their keys (`charts`).

    `replayed` says whether updates used rows of the buffer.
    """
    plain = {title: [plain_panel(panel, merged, replayed) for panel in panels] for title, panels in groups.items()}
    return {"groups": plain, "charts": {panel["key"]: panel for panels in plain.values() for panel in panels}}


def plain_panel(panel: Panel, merged: int = 1, replayed: bool = False) -> dict[str, Any]:
    return {
        **vars(panel),
        "key": re.sub(r"[^a-z0-9]+", "-", panel.title.lower()),
        "axis": vars(panel.axis),
        "merged": merged,
        "curves": [{**vars(curve), "absent": _why_absent(curve, replayed)} for curve in panel.curves],
        "steps": vars(panel.steps) if panel.steps and panel.steps.points else None,
        "summary": _in_words(panel),
    }


def _why_absent(curve: Curve, replayed: bool) -> str | None:
    if curve.points:
        return None
    if curve.role == "replay" and not replayed:
        return "Nothing was drawn from the buffer (replay.fraction was 0, or it was empty), or only to be observed."
    return "No finished iteration logged it."


def _in_words(panel: Panel) -> str:
    """Describe the chart in words, for people who can't see it."""
    found = []
    for curve in panel.curves:
        if curve.points:
            (first, start), (last, end) = curve.points[0], curve.points[-1]
            start_text, end_text = (number(value, percent=panel.axis.percent) for value in (start, end))
            found.append(f"{curve.label} from {start_text} at iteration {first:,} to {end_text} at {last:,}")
    return f"{panel.title}: {'; '.join(found) or 'not measured'}."


_STREAMS = ("fresh", "replay", "held-out", "ink")
"""Roles of curves that every run has. Curves of which a run has several are coloured by their place."""
FAMILIES = (STOPS, ESS_BY_AGE, "environment/", "reward/", "time/tool/")
"""Prefixes of metrics. All metrics with one of these prefixes are shown."""
OVERVIEW = ("Is it learning?", "From what?", "At what cost?")
"""The questions that the first screen of a run's page answers, each by a tile and a panel."""
DEMONSTRATIONS = "Is it learning what was demonstrated?"
BY_NAME = "Metrics by name"
OF_USES = "How did its uses go?"
"""The group of panels of a trajectory's page."""
_SOME_RUNS = "One by one"
"""The group of panels that are left out if they have no point."""
TOOLS, COST = "What did tools do?", "What did it cost?"
"""The groups of panels on pages of their own. Their metrics are the numbers of a question: see `question_panels`."""


@cache
def _listed() -> Mapping[str, Sequence[Mapping[str, Any]]]:
    text = files("replay.pages").joinpath("panels.yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the loader in Python would delay the first page by 50 ms
    listed: dict[str, list[dict[str, Any]]] = yaml.load(text, loader)  # noqa: S506
    return listed


def panel_groups(metrics: Metrics, config: Config) -> PanelGroups:
    """Make all panels of a run, by the questions of `panels.yaml`. A run of sft has only panels for demonstrations.

    Rows that were imported or recorded, and runs of a trainer of one's own, have only the panels with a curve.
    """
    listed = {question: specs for question, specs in _listed().items() if question not in (TOOLS, COST, OF_USES)}
    groups = {question: [_panel(spec, metrics, config) for spec in specs] for question, specs in listed.items()}
    some, demonstrations = measured_panels(groups.pop(_SOME_RUNS)), groups.pop(DEMONSTRATIONS)
    if any(curve.points for panel in demonstrations for curve in panel.curves):
        return {DEMONSTRATIONS: demonstrations}
    if "replay" not in config or (finite(metrics, "rollout/success") and not finite(metrics, "batch/fresh")):
        known = {question: measured_panels(panels) for question, panels in groups.items()}
        groups = {question: panels for question, panels in known.items() if panels}
    return groups | ({_SOME_RUNS: some} if some else {})


def measured_panels(panels: Sequence[Panel]) -> list[Panel]:
    return [panel for panel in panels if any(curve.points for curve in panel.curves)]


def question_panels(question: str, lines: Sequence[Mapping[str, Any]], more: Metrics) -> list[Panel]:
    """Make the panels of a question that have a point, from lines about an `iteration` each, and `more` metrics.

    Their curves are the numbers of the lines: `errors/raised` is the number `raised` of `errors`.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, value in line.items():
            for part, each in value.items() if isinstance(value, dict) else [("", value)]:
                if each is not None:
                    found.setdefault(f"{name}/{part}" if part else name, []).append((line["iteration"], each))
    return measured_panels([_panel(spec, {**found, **more}, {}) for spec in _listed()[question]])


def use_panels(uses: Sequence[Mapping[str, Any]]) -> PanelGroups:
    """Make the panels of the updates by which a run, the last that did so, used a trajectory."""
    mine = [use for use in uses if use["run"] == uses[-1]["run"]]
    lines = [{"iteration": use["iteration"], f"actor/{use['stream']}": use} for use in mine]
    return {OF_USES: question_panels(OF_USES, lines, {})}


def metric_panels(metrics: Metrics, names: Sequence[str], logged: Collection[str]) -> PanelGroups:
    """Make a panel of each named metric of a run. `logged` has the metrics of all runs that it is compared with."""
    # A stop reason is logged only if it occurred. Otherwise its share is 0.
    shares = {at: 0.0 for name in metrics if name.startswith(STOPS) for at, _ in metrics[name]}
    zeros = {name: shares if name in logged and name.startswith(STOPS) else {} for name in names}
    curves = [Curve(name, sorted({**zeros[name], **dict(finite(metrics, name))}.items()), "ink") for name in names]
    return {BY_NAME: [Panel(f"Metric {curve.label}", "Logged under this name.", [curve]) for curve in curves]}


def _panel(spec: Mapping[str, Any], metrics: Metrics, config: Config) -> Panel:
    steps = _curves(spec.get("steps", {}), metrics)
    panel = Panel(
        spec["title"],
        spec["how"],
        _curves(spec.get("curves", {}), metrics),
        Axis(**spec["axis"]),
        kind=spec.get("kind", "lines"),
        steps=steps[0] if steps else None,
    )
    if "family" in spec:
        panel = replace(panel, curves=[*panel.curves, *_family_curves(spec["family"], metrics)])
    return _MADE[spec["made_by"]](panel, metrics, config) if "made_by" in spec else panel


def _curves(spec: Mapping[str, Mapping[str, Any]] | str, metrics: Metrics) -> list[Curve]:
    if isinstance(spec, str):  # a metric that both streams have
        return [
            Curve("fresh", finite(metrics, f"actor/fresh/{spec}"), "fresh"),
            Curve("replay", finite(metrics, f"actor/replay/{spec}"), "replay", marker="square"),
        ]
    return [_curve(label, keys, metrics) for label, keys in spec.items()]


def _curve(label: str, keys: Mapping[str, Any], metrics: Metrics) -> Curve:
    """Make a curve. A share has the 95 % interval `of` the groups or held-out tasks of one iteration.

    Attempts at one task are not independent, so they count as one trial. The interval is rather too wide.
    """
    points, look = finite(metrics, keys["metric"]), {key: keys[key] for key in keys.keys() - {"metric", "of"}}
    counts = dict(finite(metrics, keys["of"])) if "of" in keys else {}
    known = [(at, share, counts[at]) for at, share in points if counts.get(at) and 0 <= share <= 1]
    return Curve(label, points, **look, band=[(at, *wilson_bounds(share, count)) for at, share, count in known])


def _policy_loss(panel: Panel, metrics: Metrics, config: Config) -> Panel:
    aggregation, how = stored(config, "loss.aggregation", str), panel.how
    if stored(config, "replay.successful_only", bool) and panel.curves[1].points:
        # Without this note, replay's curve would look like the fault that the sentence before warns of.
        how += " Replay is below 0 here, as it should be: only successes are drawn, and their advantages are positive."
    return replace(panel, how=how, axis=replace(panel.axis, unit=f"loss, {aggregation}" if aggregation else "loss"))


def _gradient_norm(panel: Panel, metrics: Metrics, config: Config) -> Panel:
    limit, series = stored(config, "optimizer.max_grad_norm", float), panel.curves[0].points
    if limit is None:
        return panel
    # A limit far above the curve would flatten the curve, so it is not drawn but named.
    near = any(value > limit / 2 for _, value in series)
    words = "dotted line" if near else f"{number(limit)}, far above the curve" if series else number(limit)
    how = f"Before it is scaled down to optimizer.max_grad_norm ({words}). {panel.how}"
    return replace(panel, how=how, axis=replace(panel.axis, reference=limit if near else None))


def _ess_by_age(panel: Panel, metrics: Metrics, config: Config) -> Panel:
    """Add a curve for each age bucket, the youngest first. If there are too many, the oldest are kept."""
    ages = sorted((n.removeprefix(ESS_BY_AGE) for n in metrics if n.startswith(ESS_BY_AGE)), key=age_order)[-COLOURS:]
    curves = [
        Curve(age, finite(metrics, ESS_BY_AGE + age), f"s{place}", marker="square" if place % 2 else "circle")
        for place, age in enumerate(ages)
    ]
    return replace(panel, curves=curves or [Curve("replay", (), "replay")])


def _stop_reasons(panel: Panel, metrics: Metrics, config: Config) -> Panel:
    """Add a layer for each stop reason but `answered`, whose large share would flatten the others."""
    shares = {name.removeprefix(STOPS): dict(finite(metrics, name)) for name in metrics if name.startswith(STOPS)}
    iterations = sorted({iteration for share in shares.values() for iteration in share})
    cut = sorted(shares.keys() - set(WHOLE_ENDS), key=lambda reason: (-sum(shares[reason].values()), reason))
    # A reason is logged only if it occurred. Otherwise its share is 0.
    layers = {reason: [(i, shares[reason].get(i, 0.0)) for i in iterations] for reason in cut[:6]}
    if cut[6:] or not cut:
        layers["other"] = [(i, sum(shares[reason].get(i, 0.0) for reason in cut[6:])) for i in iterations]
    return replace(panel, curves=[Curve(name, layers[name], f"s{place}") for place, name in enumerate(layers)])


def _family_curves(family: str, metrics: Metrics) -> list[Curve]:
    """Make a curve for each metric that is named as the family, labelled by the part in place of its `*`.

    There are at most as many curves as colours.
    """
    begins, _, ends = family.partition("*")
    names = sorted(name for name in metrics if name.startswith(begins) and name.endswith(ends))[:COLOURS]
    return [
        Curve(name.removeprefix(begins).removesuffix(ends), finite(metrics, name), f"s{place}")
        for place, name in enumerate(names)
    ]


_MADE: Mapping[str, Callable[[Panel, Metrics, Config], Panel]] = {
    "policy_loss": _policy_loss,
    "gradient_norm": _gradient_norm,
    "ess_by_age": _ess_by_age,
    "stop_reasons": _stop_reasons,
}
"""The functions that complete panels, by their name in `made_by`."""


def compare_runs(runs: Mapping[str, PanelGroups], places: Sequence[int]) -> PanelGroups:
    """Make panels that compare runs. `runs` has the panels of each run, by its name.

    Runs of one place have the same look, and scripts draw the mean and the range of their curves.

    Each solid curve of a run's page becomes a panel with a curve for each run. Dashed curves, which are limits and
    plans, and bars are left out.
    """
    found: dict[str, dict[str, Panel]] = {}
    for place, (name, groups) in zip(places, runs.items(), strict=True):
        for question, of_run in groups.items():
            panels = found.setdefault(question, {})
            for panel in (panel for panel in of_run if panel.kind == "lines"):
                solid = [curve for curve in panel.curves if curve.role in _STREAMS and not curve.dashed]
                for curve in solid:
                    title = panel.title if len(solid) == 1 else f"{panel.title}, {curve.label}"
                    role, dashed = f"s{place % COLOURS}", place >= COLOURS
                    mine = replace(curve, label=name, role=role, dashed=dashed, marker="circle")
                    before = panels.get(title) or replace(panel, title=title, curves=())
                    panels[title] = replace(before, curves=[*before.curves, mine])
    shown = {
        question: [*panels.values()] if question == BY_NAME else measured_panels([*panels.values()])
        for question, panels in found.items()
    }
    return {question: panels for question, panels in shown.items() if panels}
