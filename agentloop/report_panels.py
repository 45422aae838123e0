"""What the report shows: every panel with its curves and one line on how to read it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from agentloop.report_chart import Axis, Curve, Series

Metrics = Mapping[str, Series]

_LINEAR = Axis()


@dataclass(frozen=True)
class Panel:
    title: str
    how: str
    """One line on how to read it."""
    curves: tuple[Curve, ...]
    """Curves whose series is empty are listed as not measured."""
    axis: Axis = _LINEAR
    kind: Literal["lines", "bars"] = "lines"
    steps: Curve | None = None
    """A stepped line over the bars."""


@dataclass(frozen=True)
class PanelGroup:
    title: str
    panels: tuple[Panel, ...]


def panel_groups(metrics: Metrics, *, max_grad_norm: float | None = None) -> tuple[PanelGroup, ...]:
    """All panels, in reading order: does it learn, is the update sound, how old is the data, what went in."""
    return (
        PanelGroup("Is it learning?", (_success(metrics), _reward(metrics))),
        PanelGroup(
            "Is the update sound?",
            (
                _pg_loss(metrics),
                _clip_fraction(metrics),
                _entropy(metrics),
                _grad_norm(metrics, max_grad_norm),
            ),
        ),
        PanelGroup(
            "How far has the policy moved from its data?",
            (_ratios(metrics), _drift(metrics), _ess(metrics), _staleness(metrics)),
        ),
        PanelGroup(
            "What went into it?",
            (_composition(metrics), _stop_reasons(metrics), _timings(metrics), _speed(metrics)),
        ),
    )


def finite(metrics: Metrics, name: str) -> Series:
    """A metric's points, without those that are no numbers; empty when it was never logged."""
    return [(iteration, value) for iteration, value in metrics.get(name, ()) if math.isfinite(value)]


def why_absent(curve: Curve) -> str:
    """Why a curve has no points."""
    if curve.role == "replay":
        return "Nothing was drawn from the buffer: replay.fraction was 0, or the buffer had nothing to give."
    return "No finished iteration logged it."


def _success(metrics: Metrics) -> Panel:
    return Panel(
        "Success",
        "Share of episodes that succeed. Held-out tasks are never trained on: their curve is the one that counts.",
        (
            Curve("training", finite(metrics, "rollout/success"), "fresh"),
            Curve("held-out", finite(metrics, "eval/success"), "held-out", marker="square"),
        ),
        Axis(percent=True),
    )


def _reward(metrics: Metrics) -> Panel:
    return Panel(
        "Reward",
        "Mean reward of fresh episodes. Flat from the start: attempts at a task are all alike, so nothing is learned.",
        (Curve("fresh", finite(metrics, "rollout/reward"), "fresh"),),
        Axis(from_zero=True),
    )


def _pg_loss(metrics: Metrics) -> Panel:
    return Panel(
        "Policy loss",
        "Its sign: negative = raising rewarded actions. Oscillating near 0 is healthy; persistently very negative or "
        "positive is not.",
        _streams(metrics, "pg_loss"),
        Axis(reference=0.0),
    )


def _clip_fraction(metrics: Metrics) -> Panel:
    return Panel(
        "Clip fraction",
        "Share of trained tokens the clip holds back. Staying high: steps are too large, or replayed rows too old.",
        _streams(metrics, "pg_clipfrac"),
        Axis(from_zero=True),
    )


def _entropy(metrics: Metrics) -> Panel:
    return Panel(
        "Entropy",
        "How undecided the policy is, in nats per token. A slow fall is learning; near 0 early, it stopped exploring.",
        (Curve("fresh", finite(metrics, "actor/entropy"), "fresh"),),
        Axis(from_zero=True),
    )


def _grad_norm(metrics: Metrics, limit: float | None) -> Panel:
    return Panel(
        "Gradient norm",
        "Before it is scaled down to optimizer.max_grad_norm (thin line). Single spikes are harmless, a climb is not.",
        (Curve("both streams", finite(metrics, "actor/grad_norm"), "s1"),),
        Axis(from_zero=True, reference=limit),
    )


def _ratios(metrics: Metrics) -> Panel:
    return Panel(
        "Ratio",
        "Probability now over probability at the anchor. Means stay near 1; a high maximum is what the clip is for.",
        _streams(metrics, "ratio_mean", "ratio_max"),
        Axis(reference=1.0, log_if_wide=True),
    )


def _drift(metrics: Metrics) -> Panel:
    return Panel(
        "Drift",
        "How much likelier a token is now than when it was sampled; 1 = not moved. Replayed rows drift with age.",
        _streams(metrics, "drift_mean", "drift_max"),
        Axis(reference=1.0, log_if_wide=True),
    )


def _ess(metrics: Metrics) -> Panel:
    return Panel(
        "Effective sample size",
        "Share of a stream's rows that still count once weighted by drift. Below 50 %, draw less or younger replay.",
        _streams(metrics, "ess"),
        Axis(percent=True),
    )


def _staleness(metrics: Metrics) -> Panel:
    return Panel(
        "Staleness of replayed rows",
        "Publishes between sampling and drawing. Growing with the run is natural; drift and ESS tell whether it hurts.",
        (
            Curve("mean", finite(metrics, "replay/staleness_mean"), "replay", marker="square"),
            Curve("max", finite(metrics, "replay/staleness_max"), "replay", dashed=True, peak=True),
        ),
        Axis(from_zero=True),
    )


def _composition(metrics: Metrics) -> Panel:
    return Panel(
        "Batch composition",
        "Bars: rows that went in. Stepped line: fresh rows as configured; they part where the buffer ran short.",
        (
            Curve("fresh", finite(metrics, "batch/fresh"), "fresh"),
            Curve("replay", finite(metrics, "batch/replay"), "replay"),
        ),
        kind="bars",
        steps=Curve("fresh as configured", finite(metrics, "batch/planned_fresh"), "ink"),
    )


def _stop_reasons(metrics: Metrics) -> Panel:
    prefix = "rollout/stop/"
    totals = {name: sum(v for _, v in finite(metrics, name)) for name in metrics if name.startswith(prefix)}
    ordered = sorted(totals, key=lambda name: (-totals[name], name))
    curves = [Curve(name.removeprefix(prefix), finite(metrics, name), f"s{i}") for i, name in enumerate(ordered[:6])]
    if ordered[6:]:
        rest: dict[int, float] = {}
        for name in ordered[6:]:
            for iteration, value in finite(metrics, name):
                rest[iteration] = rest.get(iteration, 0.0) + value
        curves.append(Curve("other", sorted(rest.items()), "s6"))
    return Panel(
        "How episodes ended",
        "Many cut off by a limit: raise rollout.max_turns, rollout.max_tokens_per_turn or context.max_tokens.",
        tuple(curves),
        Axis(percent=True),
        kind="bars",
    )


def _timings(metrics: Metrics) -> Panel:
    phases = ("collect", "draw", "update", "publish")
    return Panel(
        "Seconds per iteration",
        "Collecting and updating should be most of it; a thick draw or publish means the disk is slow.",
        tuple(Curve(phase, finite(metrics, f"time/{phase}"), f"s{i}") for i, phase in enumerate(phases)),
        Axis(from_zero=True),
        kind="bars",
    )


def _speed(metrics: Metrics) -> Panel:
    return Panel(
        "Tokens per second",
        "Tokens of the whole batch over the seconds of the whole iteration. Falls when episodes grow fewer but longer.",
        (Curve("both streams", finite(metrics, "speed/tokens_per_second"), "s2"),),
        Axis(from_zero=True),
    )


def _streams(metrics: Metrics, name: str, peak: str | None = None) -> tuple[Curve, ...]:
    """A metric of both streams on shared axes; with `peak`, its extreme as dashed curves."""
    curves: list[Curve] = []
    for stream, shape in _STREAMS:
        curves.append(Curve(_label(stream, name), finite(metrics, f"actor/{stream}/{name}"), stream, marker=shape))
        if peak:
            series = finite(metrics, f"actor/{stream}/{peak}")
            curves.append(Curve(_label(stream, peak), series, stream, dashed=True, peak=True))
    return tuple(curves)


_STREAMS: Sequence[tuple[str, Literal["circle", "square"]]] = (("fresh", "circle"), ("replay", "square"))


def _label(stream: str, name: str) -> str:
    suffix = name.rpartition("_")[2]
    return f"{stream}, {suffix}" if suffix in ("mean", "max") else stream
