"""The panels of a run's page, each with its curves and one line on how to read it; and those of several runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from replay.pages.charts import COLOURS, Axis, Config, Curve, Metrics, Panel, PanelGroups, finite, number
from replay.questions.runs import STOPS
from replay.records import StopReason, age_order
from replay.records import stored_setting as stored

_ESS_OF_AGE = "actor/replay/ess/age_"
_STREAMS = ("fresh", "replay", "held-out", "ink")
"""Roles of curves that every run has; what it has several of is coloured by place."""
_ENVIRONMENT = re.compile(r"environment/([^/]+)/(.+)")
_PART, _TOOL = "reward/", "time/tool/"
FAMILIES = (STOPS, _ESS_OF_AGE, "environment/", _PART, _TOOL)
"""Beginnings of the names of metrics that are shown whatever comes after."""


def panel_groups(metrics: Metrics, config: Config) -> PanelGroups:
    """All panels, in reading order: does it learn, is the update sound, how old is the data, what went in; last, what
    the run has several of."""
    groups = {
        "Is it learning?": _learning(metrics),
        "Is the update sound?": _update(metrics, config),
        "How far has the policy moved from its data?": _distance(metrics),
        "What went into it?": _batch(metrics),
    }
    several = _several(metrics)
    return groups | ({"One by one": several} if several else {})


def _learning(metrics: Metrics) -> list[Panel]:
    return [
        Panel(
            "Success",
            "Share of episodes that succeed. Held-out tasks are never trained on: their curve is the one that counts.",
            [
                Curve("training", finite(metrics, "rollout/success"), "fresh"),
                Curve("held-out", finite(metrics, "eval/success"), "held-out", marker="square"),
            ],
            Axis("share of episodes", percent=True, whole=True),
        ),
        Panel(
            "Reward",
            "Mean reward of fresh episodes. Flat from the start: attempts at a task are all alike, so nothing is "
            "learned.",
            [Curve("fresh", finite(metrics, "rollout/reward"), "fresh")],
            Axis("reward per episode", from_zero=True),
        ),
    ]


def _update(metrics: Metrics, config: Config) -> list[Panel]:
    return [
        _pg_loss(metrics, config),
        Panel(
            "Clip fraction",
            "Trained tokens that the clip holds back. Staying above 20 %: steps are too large, or replayed rows too "
            "old.",
            _streams(metrics, "pg_clipfrac"),
            Axis("share of trained tokens", percent=True, from_zero=True, least_span=0.01),
        ),
        Panel(
            "Entropy",
            "How undecided the policy is. A slow fall is learning; near 0 while success is low, it has stopped "
            "exploring.",
            [Curve("fresh", finite(metrics, "actor/entropy"), "fresh")],
            Axis("nats per token", from_zero=True),
        ),
        _grad_norm(metrics, stored(config, "optimizer.max_grad_norm", float)),
    ]


def _pg_loss(metrics: Metrics, config: Config) -> Panel:
    how = (
        "Negative = raising rewarded actions. Oscillating near 0 is healthy; persistently very negative or positive is "
        "not."
    )
    if stored(config, "replay.successful_only", bool) and finite(metrics, "actor/replay/pg_loss"):
        # Without a word, the orange line looks like the fault that the sentence before warns of.
        how += " Here replay lies below 0 as it should: only successes are drawn, and their advantages are positive."
    aggregation = stored(config, "loss.aggregation", str)
    unit = f"loss, {aggregation}" if aggregation else "loss"
    return Panel("Policy loss", how, _streams(metrics, "pg_loss"), Axis(unit, reference=0.0))


def _grad_norm(metrics: Metrics, limit: float | None) -> Panel:
    series = finite(metrics, "actor/grad_norm")
    how, near = "Single spikes are harmless, a climb is not.", False
    if limit is not None:
        # A limit far above the curve would press it flat, so it is named in words and not drawn.
        near = any(value > limit / 2 for _, value in series)
        words = "dotted line" if near else f"{number(limit)}, far above the curve" if series else number(limit)
        how = f"Before it is scaled down to optimizer.max_grad_norm ({words}). {how}"
    axis = Axis("norm, both streams together", from_zero=True, reference=limit if near else None)
    return Panel("Gradient norm", how, [Curve("both streams", series, "ink")], axis)


def _distance(metrics: Metrics) -> list[Panel]:
    mean = Axis("mean over tokens", reference=1.0, least_span=0.02)
    largest = Axis("largest of all tokens", reference=1.0, least_span=0.2, log_if_wide=True)
    return [
        Panel(
            "Ratio",
            "Probability in the update over probability at the anchor, the loss's factor. The mean stays near 1.",
            _streams(metrics, "ratio_mean"),
            mean,
        ),
        Panel(
            "Largest ratio",
            "The one token whose probability grew most. Far above 1 is what the clip is for; a climb over the run is "
            "not.",
            _streams(metrics, "ratio_max"),
            largest,
        ),
        Panel(
            "Drift",
            "How much likelier a token is now than when it was sampled. Fresh is 1, replay moves off with age.",
            _streams(metrics, "drift_mean"),
            mean,
        ),
        Panel(
            "Largest drift",
            "The one token that moved most since it was sampled. Fresh well above 1: sampling and training disagree.",
            _streams(metrics, "drift_max"),
            largest,
        ),
        Panel(
            "Effective sample size",
            "How many rows still count once weighted by drift. Below 50 % (dotted line), draw less or younger replay.",
            _streams(metrics, "ess"),
            Axis("share of the stream's rows", percent=True, whole=True, reference=0.5),
        ),
        _ess_by_age(metrics),
        Panel(
            "Staleness of replayed rows",
            "Publishes between sampling and drawing. Growing with the run is natural; drift and ESS tell whether it "
            "hurts.",
            [
                Curve("mean", finite(metrics, "replay/staleness_mean"), "replay", marker="square"),
                Curve("max", finite(metrics, "replay/staleness_max"), "replay", dashed=True),
            ],
            Axis("publishes", from_zero=True),
        ),
    ]


def _ess_by_age(metrics: Metrics) -> Panel:
    """The youngest first; the oldest are the ones to look at, so of many buckets these are kept."""
    ages = sorted((n.removeprefix(_ESS_OF_AGE) for n in metrics if n.startswith(_ESS_OF_AGE)), key=age_order)[-7:]
    curves = [
        Curve(age, finite(metrics, _ESS_OF_AGE + age), f"s{place}", marker="square" if place % 2 else "circle")
        for place, age in enumerate(ages)
    ]
    return Panel(
        "Effective sample size by age",
        "Of the replayed rows alone, by staleness. The oldest goes first: the age to set replay.max_staleness to.",
        curves or [Curve("replay", (), "replay")],
        Axis("share of the bucket's rows", percent=True, whole=True, reference=0.5),
    )


def _batch(metrics: Metrics) -> list[Panel]:
    phases = [f"time/{phase}" for phase in ("collect", "draw", "update", "publish")]
    return [
        Panel(
            "Batch composition",
            "Bars: what went in. Line: fresh as ruled; blue above it stands in for replay the buffer could not give.",
            [
                Curve("fresh", finite(metrics, "batch/fresh"), "fresh"),
                Curve("replay", finite(metrics, "batch/replay"), "replay"),
            ],
            Axis("trajectories", from_zero=True),
            kind="bars",
            steps=Curve("fresh as ruled", finite(metrics, "batch/planned_fresh"), "ink"),
        ),
        Panel(
            "Mixing ratio",
            "Replay's share of the batch. Ruled under configured: not begun yet, or held back by the controller; "
            "achieved under ruled: the buffer had no more.",
            [
                Curve("achieved", finite(metrics, "batch/achieved_fraction"), "replay", marker="square"),
                Curve("ruled", finite(metrics, "batch/ruled_fraction"), "ink", dashed=True),
                Curve("configured", finite(metrics, "batch/fraction"), "s2", dashed=True),
            ],
            Axis("share of trajectories", percent=True, from_zero=True, least_span=0.05),
        ),
        _stop_reasons(metrics),
        Panel(
            "Failed tool calls",
            "Calls in which the tool itself raised, crashed or ran out of time. Above 0, mend the tool: the policy "
            "can't.",
            [Curve("fresh", finite(metrics, "rollout/failed_calls"), "fresh")],
            Axis("share of tool calls", percent=True, from_zero=True, least_span=0.04),
        ),
        Panel(
            "Seconds per iteration",
            "Where the time goes. Collect and update should be most of it; a thick draw or publish means a slow disk.",
            _one_each(metrics, "time/", phases),
            Axis("seconds", from_zero=True),
            kind="bars",
        ),
        Panel(
            "Tokens per second",
            "Tokens of the whole batch over the seconds of the whole iteration. A sudden dip is most often a busy "
            "machine.",
            [Curve("both streams", finite(metrics, "speed/tokens_per_second"), "ink")],
            Axis("tokens per second", from_zero=True),
        ),
    ]


def _stop_reasons(metrics: Metrics) -> Panel:
    """Answered episodes are left out: they are nearly all, and would press the others flat."""
    shares = {name.removeprefix(STOPS): dict(finite(metrics, name)) for name in metrics if name.startswith(STOPS)}
    iterations = sorted({iteration for share in shares.values() for iteration in share})
    cut = sorted(shares.keys() - {StopReason.ANSWERED}, key=lambda reason: (-sum(shares[reason].values()), reason))
    # A reason is logged only where it occurred; elsewhere its share is 0, also in the legend.
    layers = [(reason, [(i, shares[reason].get(i, 0.0)) for i in iterations]) for reason in cut[:6]]
    if cut[6:] or not cut:
        layers.append(("other", [(i, sum(shares[reason].get(i, 0.0) for reason in cut[6:])) for i in iterations]))
    return Panel(
        "Episodes cut short",
        "Ended without an answer, by stop reason. Many: raise rollout.max_turns or max_tokens_per_turn, or "
        "context.max_tokens.",
        [Curve(reason, series, f"s{index}") for index, (reason, series) in enumerate(layers)],
        Axis("share of episodes", percent=True, from_zero=True, least_span=0.04),
        kind="bars",
    )


def _several(metrics: Metrics) -> list[Panel]:
    """What some runs have: a reward of several parts, tools that were run, several environments."""
    parts, tools, replies = _family(metrics, _PART), _family(metrics, _TOOL), finite(metrics, "time/reply")
    panels = []
    if parts:
        panels += [
            Panel(
                "Parts of the reward",
                "Means of fresh episodes, unweighted. The part that rises is the one that is learned.",
                parts,
                Axis("reward per episode", from_zero=True),
            )
        ]
    if tools:
        panels += [
            Panel(
                "Seconds of a turn",
                "For which an episode waits for a reply, and a run of each tool takes. A tool far above the reply: "
                "collect ahead, or declare it deterministic.",
                [Curve("reply", replies, "fresh"), *tools],
                Axis("seconds", from_zero=True),
            )
        ]
    return [*panels, *_environments(metrics)]


def _environments(metrics: Metrics) -> list[Panel]:
    """None for a run with one environment."""
    names = sorted({found[1] for name in metrics if (found := _ENVIRONMENT.fullmatch(name))})
    if not names:
        return []

    def curves(figure: str) -> list[Curve]:
        return [
            Curve(name, finite(metrics, f"environment/{name}/{figure}"), f"s{place % COLOURS}")
            for place, name in enumerate(names)
        ]

    share = Axis("share of episodes", percent=True, whole=True)
    return [
        Panel(
            "Held-out success, by environment",
            "Share of each one's held-out tasks that are solved. One that falls while others rise is forgotten.",
            curves("held_out_success"),
            share,
        ),
        Panel(
            "Training success, by environment",
            "Of the fresh episodes of each. Near 0 or 1: its groups have no signal, and its share is better elsewhere.",
            curves("success"),
            share,
        ),
        Panel(
            "Episodes, by environment",
            "Fresh episodes of each iteration. Over all iterations they follow the configured shares.",
            curves("episodes"),
            Axis("episodes", from_zero=True),
            kind="bars",
        ),
    ]


def _family(metrics: Metrics, beginning: str) -> list[Curve]:
    """The first metrics whose names begin so: as many as there are colours."""
    return _one_each(metrics, beginning, sorted(name for name in metrics if name.startswith(beginning))[:COLOURS])


def _one_each(metrics: Metrics, beginning: str, names: Sequence[str]) -> list[Curve]:
    """A curve of its own colour for each metric, called by what comes after the beginning."""
    return [Curve(name.removeprefix(beginning), finite(metrics, name), f"s{place}") for place, name in enumerate(names)]


def _streams(metrics: Metrics, name: str) -> list[Curve]:
    """A metric of both streams on shared axes."""
    return [
        Curve("fresh", finite(metrics, f"actor/fresh/{name}"), "fresh"),
        Curve("replay", finite(metrics, f"actor/replay/{name}"), "replay", marker="square"),
    ]


def compared(runs: Mapping[str, PanelGroups]) -> PanelGroups:
    """The panels of several runs, by their names: each line of a run's page in a panel of its own, with all runs.

    Limits and plans, which a page dashes, and bars are left out.
    """
    found: dict[str, dict[str, Panel]] = {}
    for place, (name, groups) in enumerate(runs.items()):
        for question, of_run in groups.items():
            panels = found.setdefault(question, {})
            for panel in (panel for panel in of_run if panel.kind == "lines"):
                solid = [curve for curve in panel.curves if curve.role in _STREAMS and not curve.dashed]
                for curve in solid:
                    title = panel.title if len(solid) == 1 else f"{panel.title}, {curve.label}"
                    mine = Curve(name, curve.points, f"s{place % COLOURS}", dashed=place >= COLOURS)
                    before = panels.get(title) or replace(panel, title=title, curves=())
                    panels[title] = replace(before, curves=[*before.curves, mine])
    shown = {
        question: [panel for panel in panels.values() if any(curve.points for curve in panel.curves)]
        for question, panels in found.items()
    }
    return {question: panels for question, panels in shown.items() if panels}
