"""The head of a run's page: what its configuration says in one line, and a few numbers."""

from __future__ import annotations

from typing import NamedTuple

from replay.pages.charts import Config, number
from replay.questions.limited_by import regime
from replay.questions.runs import Metrics, finite
from replay.records import stored_setting as stored


class Tile(NamedTuple):
    name: str
    words: tuple[tuple[str, str], ...]
    """Each with its class: `plain`, `unit`, `arrow`, or `rising` where a number rose."""
    note: str
    hero: bool = False
    """True: the one to look at first."""
    streams: tuple[float, float] | None = None
    """Fresh and replayed, drawn as a bar."""


def tiles(metrics: Metrics, config: Config) -> tuple[Tile, ...]:
    """Held-out success, training time, the trajectories that fed updates, and what limits the run."""
    found = regime(metrics, config)
    limited = () if found is None else (Tile("limited by", _plain(found.limit), found.text),)
    return (_success(metrics), _time(metrics, stored(config, "run.iterations", int)), _rows(metrics), *limited)


def _plain(text: str) -> tuple[tuple[str, str], ...]:
    return ((text, "plain"),)


def duration(seconds: float) -> str:
    """`48 s`, `1 min 48 s`, `3 h 12 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s" if whole >= 10 else f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _success(metrics: Metrics) -> Tile:
    name, held_out = "held-out success", finite(metrics, "eval/success")
    if not held_out:
        return Tile(name, _plain("not measured"), "No evaluation was made in this run.", hero=True)
    (first, start), (last, end) = held_out[0], held_out[-1]
    if len(held_out) == 1:
        return Tile(name, _plain(_percent(start)), f"at iteration {first:,}, evaluated once", hero=True)
    words = ((_percent(start), "plain"), ("\u2192", "arrow"), (_percent(end), "rising" if end > start else "plain"))
    return Tile(name, words, f"from iteration {first:,} to {last:,}, on tasks never trained on", hero=True)


def _time(metrics: Metrics, limit: int | None) -> Tile:
    seconds = [value for _, value in finite(metrics, "time/iteration")]
    if not seconds:
        return Tile("training time", _plain("not measured"), "No iteration was finished.")
    of_limit = f" of at most {limit:,}" if limit is not None and len(seconds) < limit else ""
    each = duration(sum(seconds) / len(seconds))
    note = f"{len(seconds):,}{of_limit} iterations, {each} each, evaluations not counted"
    return Tile("training time", _plain(duration(sum(seconds))), note)


def _rows(metrics: Metrics) -> Tile:
    def total(name: str) -> float:
        return sum(value for _, value in finite(metrics, f"batch/{name}"))

    name, fresh, replay = "trajectories in batches", total("fresh"), total("replay")
    if not fresh + replay:
        return Tile(name, _plain("none"), "No iteration was finished.")
    words = ((f"{fresh:,.0f}", "plain"), ("fresh", "unit"), (f"+ {replay:,.0f}", "plain"), ("replayed", "unit"))
    shares = (_percent(part / (fresh + replay)) for part in (replay, total("planned_replay")))
    return Tile(name, words, "{} from the buffer, configured {}".format(*shares), streams=(fresh, replay))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def setting(config: Config) -> str:
    """What makes this run this run, in one line."""
    seed, target = stored(config, "run.seed", int), stored(config, "run.stop_at_success", float)
    parts = [
        stored(config, "environment.name", str),
        None if seed is None else f"seed {seed}",
        _replay(config),
        None if target is None else f"ends at {number(target, percent=True)} held-out success twice in a row",
    ]
    return " \u00b7 ".join(part for part in parts if part).replace(" %", "\u00a0%")


def _replay(config: Config) -> str | None:
    fraction, sampler = stored(config, "replay.fraction", float), stored(config, "replay.sampler", str)
    if fraction is None:
        return None
    if not (fraction or stored(config, "replay.schedule.final", float)):
        return "no replay"
    words = f"replay {number(fraction, percent=True)}" + (f", {sampler} sampler" if sampler else "")
    return words + (", observed only" if stored(config, "replay.mode", str) == "observe" else "")
