import base64
import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import closing
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from agentloop.config import RunConfig
from agentloop.config.config_file import to_plain
from agentloop.runs.run_report import report_run
from context.authors import default_authors
from replay.diagnosis import regime
from replay.pages.panels import number, panel_groups
from replay.pages.report import duration, panel_series, tile_series, tiles, write_report
from replay.records import RunRecord
from replay.store import ReplayStore
from tests.replay.pages.serving import charts_of


def series(*values: float, first: int = 1) -> list[tuple[int, float]]:
    return [*enumerate(values, start=first)]


TWO_STREAMS = {
    "eval/success": [(0, 0.172), (3, 0.961)],
    "eval/tasks": [(0, 256.0), (3, 256.0)],
    "time/evaluation": [(0, 6.0), (3, 10.0)],
    "batch/source/self": series(24.0, 20.0, first=2),
    "batch/source/teacher": series(8.0, 12.0, first=2),
    "buffer/rows": series(128.0, 224.0, 320.0),
    "buffer/eligible": series(100.0, 200.0, 250.0),
    "rollout/groups_without_signal": series(0.5, 0.25, 0.0),
    "actor/peak_memory_gb": series(12.5, 12.0, 12.0),
    **dict.fromkeys(("rollout/success", "rollout/reward"), series(0.2, 0.5, 0.9)),
    **{
        f"actor/{stream}/{name}": series(1.0, 1.1, 1.2)
        for stream in ("fresh", "replay")
        for name in ("pg_loss", "pg_clipfrac", "ratio_mean", "ratio_max", "drift_mean", "token_gap_max", "ess")
    },
    **{f"actor/replay/ess/age_{age}": series(0.9, 0.8, first=2) for age in ("1", "16-31", "2-3", "unknown")},
    "actor/entropy": series(0.9, 0.8, 0.7),
    "actor/grad_norm": series(0.4, 0.5, 0.6),
    **{f"replay/staleness_{name}": series(1.0, 1.5, first=2) for name in ("mean", "max")},
    "batch/planned_fresh": series(96.0, 96.0, 96.0),
    "batch/planned_replay": series(32.0, 32.0, 32.0),
    **{f"batch/{name}": series(0.0, 0.25, 0.25) for name in ("ruled_fraction", "achieved_fraction", "fraction")},
    "batch/fresh": series(128.0, 96.0, 96.0),
    "batch/replay": series(0.0, 32.0, 32.0),
    "rollout/stop/answered": series(0.75, 1.0, 1.0),
    "rollout/stop/max_turns": series(0.25),
    "rollout/failed_calls": series(0.5, 0.25, 0.0),
    **{f"time/{name}": series(0.5, 0.5, 0.5) for name in ("collect", "draw", "update", "publish", "reply")},
    **{f"time/tool/{name}": series(0.5, 0.4, 0.4) for name in ("lookup", "search")},
    **{f"reward/{part}": series(0.2, 0.5, 0.9) for part in ("environment", "brevity")},
    "time/iteration": series(36.0, 36.0, 36.0),
    "speed/tokens_per_second": series(2e4, 2.1e4, 2.2e4),
}


CONFIG = RunConfig.model_validate(
    {
        "run": {"seed": 7, "iterations": 60, "stop_at_success": 0.95},
        "replay": {"fraction": 0.25, "schedule": {"shape": "linear", "final": 0.0}},
    }
)


def report(folder: Path, metrics: Mapping[str, Any] = TWO_STREAMS, **more: Any) -> str:
    """The file's text. `more`: `name`, `config` and `config_text`."""
    given = {"name": "quickstart-001", "config": to_plain(CONFIG), "config_text": "run: {}", **more}
    authors = default_authors()
    store = ReplayStore.create(folder / "replay.sqlite")
    store.add_run(RunRecord("run-a", given["name"], given["config"], authors.to_json(), authors.hash, "0.1.0"))
    for name, series in metrics.items():
        for iteration, value in series:
            store.add_metrics("run-a", iteration, {name: value})
    path = write_report(store, folder / "report.html", config_text=given["config_text"])
    store.close()
    return path.read_text(encoding="utf-8")


def text_of(html: str) -> str:
    """What a reader sees, tags, titles, styles and scripts dropped."""
    body = re.sub(r"<(style|title|script)\b.*?</\1>", " ", html, flags=re.S)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", body)))


def test_report_is_the_page_of_the_run_and_needs_nothing_but_itself(tmp_path: Path) -> None:
    html = report(tmp_path)
    seen = text_of(html)
    for part in (
        "Is it learning? 17.2 % → 96.1 % held-out success, on 256 tasks never trained on, from iteration 0 to 3",
        "best the newest training success 53.3 % (newest 3 iterations)",  # (0.2 + 0.5 + 0.9) / 3
        "From what? 320 fresh + 64 replayed trajectories in batches, 16.7 % from the buffer, configured 25.0 %",
        "replayed by source self 44, teacher 20 in the buffer 320 rows, 250 eligible",
        "At what cost? 36 s per iteration training time 1 min 48 s, 3 of at most 60 iterations, evaluations not",
        # 0.5 s of 36; 36 x (20,000 + 21,000 + 22,000) tokens
        "collect 0.5 s, 1.4 % update 0.5 s, 1.4 % evaluation 8.0 s each, 2 made",
        "tokens in batches 2,268,000, 21,000 per second peak memory 12.5 GB on the GPU",
        "limited by optimizer steps 57 successes expected per batch of fresh episodes; 25 % of the groups without",
        "quickstart-001 stopped after iteration 3 of 60",
        "seed 7",
        "run: {}",
    ):
        assert part in seen, part
    found = charts_of(html)
    loss = {curve["label"]: curve["points"] for curve in found["policy-loss"]["curves"]}
    assert loss == {key: [[1, 1.0], [2, 1.1], [3, 1.2]] for key in ("fresh", "replay")}
    labels = {"parts-of-the-reward": ["brevity", "environment"], "seconds-of-a-turn": ["reply", "lookup", "search"]}
    for key in labels:
        assert [curve["label"] for curve in found[key]["curves"] if curve["points"]] == labels[key]
    assert html.partition('<script type="module">')[0].count('<div class="chart"') == len(found)

    # It needs nothing but itself, and runs one script.
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", html, re.S)
    assert [kind.strip() for kind, _ in scripts] == ['type="application/json" id="charts"', 'type="module"']
    own = base64.b64encode(hashlib.sha256(scripts[1][1].encode()).digest()).decode()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    got = unescape(policy).split("; ")[:3]
    assert got == ["default-src 'none'", "style-src 'unsafe-inline'", f"script-src 'sha256-{own}'"]
    assert "import " not in scripts[1][1].partition("uPlot")[0] and not re.search(r"^import\b", scripts[1][1], re.M)
    outside = re.sub(r"<(style|script)\b.*?</\1>", "", html, flags=re.S)
    assert not re.findall(r"<(?:link|img|iframe|object|base|form)\b|\b(?:src|href|srcset|on\w+)=", outside)
    (style,) = re.findall("<style>(.*?)</style>", html, re.S)
    assert "url(" not in style and "@import" not in style


def test_report_shows_text_as_text(tmp_path: Path) -> None:
    evil = "</pre></script><script>alert(1)</script>\"'&\u202e"
    html = report(tmp_path, {f"rollout/stop/{evil}": [(1, 0.5)]}, name=evil, config_text=evil)
    assert html.count("<script") == 2 and "\u202e" not in html
    assert html.count("&lt;script&gt;") >= 3  # title, heading, configuration
    (curve,) = charts_of(html)["episodes-cut-short"]["curves"]
    assert curve["label"] == evil


def test_a_run_of_sft_has_a_loss_and_counts_updates() -> None:
    learning, cost = tiles({"sft/held_out_loss": series(1.5, 0.5), "time/iteration": series(2.0, 4.0)}, {})
    assert [word for word, _ in learning.words] == ["1.500", "\u2192", "0.500"]
    assert [word for word, _ in cost.words] == ["3.0 s", "per update"]
    assert cost.note == "training time 6.0 s, 2 updates, evaluations not counted"


@pytest.mark.parametrize("metrics", [{}, {"eval/success": [(0, 0.172)]}, {"actor/entropy": [(1, float("nan"))]}])
def test_report_of_a_run_that_ended_at_once_is_whole(tmp_path: Path, metrics: dict[str, Any]) -> None:
    html = report(tmp_path, metrics)
    seen = text_of(html)
    assert "No finished iteration logged it." in json.dumps(charts_of(html))
    assert "nan" not in seen.lower().split() and html.rstrip().endswith("</html>")
    once = "17.2 % held-out success, at iteration 0, evaluated once" in seen
    assert once == ("eval/success" in metrics) and "\u2192" not in seen


def test_curves_of_a_run_without_replay_say_why_and_a_report_leaves_out_what_no_setting_says(tmp_path: Path) -> None:
    plain = {name: v for name, v in TWO_STREAMS.items() if "replay" not in name}
    config = {"run": {"seed": 7}, "replay": {"fraction": 0.25, "schedule": "linear", "successful_only": "yes"}}
    html = report(tmp_path, plain, config=config)
    (replayed,) = [curve for curve in charts_of(html)["drift"]["curves"] if curve["label"] == "replay"]
    assert replayed["absent"].startswith("Nothing was drawn from the buffer")
    assert '<p class="setting soft">seed 7 \u00b7 replay 25\u00a0%</p>' in html
    assert "36 s per iteration training time 1 min 48 s, 3 iterations, evaluations not counted" in text_of(html)


def test_report_asks_for_every_metric_it_shows_and_for_no_other(tmp_path: Path) -> None:
    report(tmp_path, TWO_STREAMS | {"actor/fresh/ratio_p01": [(1, 0.5)], "tools/repeated": [(1, 0.5)]})
    with closing(ReplayStore.open(tmp_path / "replay.sqlite", read_only=True)) as store:
        asked = {**panel_series(store, "run-a", 1), **tile_series(store, "run-a")}
    assert asked.keys() == {*TWO_STREAMS, "tools/repeated"}


@pytest.mark.parametrize(
    ("config", "shown"),
    [(to_plain(CONFIG), "# Seed of everything that is random."), ({"replay": {"forgotten": 3}}, '"forgotten": 3')],
    ids=["as it is printed", "of another version, as stored"],
)
def test_report_replaces_the_older_and_has_the_settings(tmp_path: Path, config: dict[str, Any], shown: str) -> None:
    report(tmp_path, config=config)
    with closing(ReplayStore.open(tmp_path / "replay.sqlite", read_only=True)) as store:
        html = report_run(store, tmp_path / "report.html").read_text(encoding="utf-8")
    assert shown in unescape(html) and html.count("<!doctype") == 1
    assert not list(tmp_path.glob("*.tmp"))


# Panels


def test_no_two_panels_share_a_key_and_no_two_curves_of_one_a_metric() -> None:
    metrics = Counted()
    panels = [panel for group in panel_groups(metrics, {}).values() for panel in group]
    assert len({panel.title.lower() for panel in panels}) == len(panels)
    for panel in panels:
        shown = [curve.points[0] for curve in panel.curves if curve.points]
        assert len(set(shown)) == len(shown), panel.title


class Counted(dict[str, list[tuple[int, float]]]):
    """Every metric has one point: how many were asked for before it."""

    def get(self, name: str, default: Any = None) -> list[tuple[int, float]]:
        return self.setdefault(name, [(1, float(len(self)))])


def test_success_has_an_interval_over_tasks() -> None:
    metrics = {"eval/success": series(0.0, 0.8, 0.5), "eval/tasks": series(10.0, 10.0)}
    training = {"rollout/success": series(0.5), "batch/fresh": series(80.0), "groups/collected": series(10.0)}
    success = panel_groups(metrics | training, {})["Is it learning?"][0]
    # 10 groups of 8 are 10 trials: half of 10 with half the width 0.2634.
    assert success.curves[0].band == [(1, pytest.approx(0.2366, abs=1e-4), pytest.approx(0.7634, abs=1e-4))]
    # Wilson: of none of 10, z^2 / (10 + z^2); of 8 of 10 with centre 0.7166, and half its width 0.2264.
    (_, low, high), (_, from_, to) = success.curves[1].band
    assert (low, high) == (0.0, pytest.approx(3.841459 / 13.841459))
    assert (from_, to) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))


def test_numbers_and_durations_are_short() -> None:
    shown = {0.0: "0", 0.0333333: "0.0333", 1234567.0: "1.2e+06", 12345.0: "12,345", -0.00002: "-2e-05", 96.0: "96"}
    shown[8.2e-17] = "0"  # an error of rounding
    assert {value: number(value) for value in shown} == shown
    shares = {0.9609: "96.1 %", 1.0: "100 %", 0.99983: "99.983 %"}  # whole only when nothing is missing
    assert {value: number(value, percent=True) for value in shares} == shares
    durations = {3.21: "3.2 s", 48: "48 s", 108: "1 min 48 s", 11520: "3 h 12 min"}
    assert {seconds: duration(seconds) for seconds in durations} == durations


# What limits a run


def of(*, success: float, fresh: float = 64, **metrics: float) -> dict[str, tuple[tuple[int, float], ...]]:
    """Two iterations of equal values, but for success: half of what is given, then half as much again."""
    named = {"batch/fresh": fresh, **{name.replace("__", "/"): value for name, value in metrics.items()}}
    both = {name: ((1, value), (2, value)) for name, value in named.items()}
    return {"rollout/success": ((1, 0.5 * success), (2, 1.5 * success)), **both}


LATE = tuple((i, 0.5 * (i >= 20)) for i in range(28))


@pytest.mark.parametrize(
    ("metrics", "limit"),
    [
        # 0.005 x 64 = 0.32 successes per batch, below 1/3; 0.006 x 64 = 0.384
        (of(success=0.005), "successes"),
        (of(success=0.006), "optimizer steps"),
        (of(success=0.5, time__in_tools=0.31), "tools"),
        (of(success=0.5, time__in_tools=0.29), "optimizer steps"),
        (of(success=0.5, time__in_tools=0.9, tools__repeated=0.6), "repeated tool calls"),
        (of(success=0.5, time__in_tools=0.9, tools__repeated=0.2), "tools"),
        # They are answered from memory already.
        (of(success=0.5, time__in_tools=0.9, tools__repeated=0.6, tools__replayed=0.6), "tools"),
        # Nothing to learn from comes first.
        (of(success=0.0, time__in_tools=0.9), "successes"),
        (of(success=0.5, rollout__groups_without_signal=1.0), "equal groups"),
        (of(success=0.1, rollout__groups_without_signal=0.9, rollout__groups_all_failed=0.7), "equal groups"),
        (of(success=0.1, rollout__groups_without_signal=0.9, rollout__groups_all_failed=0.8), "successes"),
        # Only the newest eight iterations count.
        ({"rollout/success": LATE, "batch/fresh": tuple((i, 64.0) for i in range(28))}, "optimizer steps"),
    ],
)
def test_the_limit_follows_from_the_metrics(metrics: dict[str, tuple[tuple[int, float], ...]], limit: str) -> None:
    found = regime(metrics, {})
    assert found is not None and found.limit == limit
    assert [tile.name for tile in tiles(metrics, {"run": {}})][-1] == "limited by"
    assert "limited by" not in [tile.name for tile in tiles(metrics, {})]  # a trainer without settings
    assert regime({}, {}) is regime(of(success=1.0, rollout__groups_without_signal=0.9), {}) is None


def test_facts_and_advice_are_said() -> None:
    numbers = {"rollout__groups_without_signal": 0.5, "tools__repeated": 0.7, "tools__replayed": 0.6}
    numbers["rollout__groups_all_failed"] = 0.2
    found = regime(of(success=0.25, time__in_tools=0.4, **numbers), {})
    assert found is not None
    assert found.text == (
        "16 successes expected per batch of fresh episodes; 50 % of the groups without a signal, 20 % as all "
        "attempts failed; 70 % of the tool calls repeated, 60 % answered from memory; 40 % of an episode's time in "
        "tools, 60 % in replies. Try replay.fraction 0.25, which takes fewer episodes, or collection.by workers "
        "(rollout.engine vllm) with collection.max_staleness 1 or more, so that the policy learns while "
        "tools work: docs/evidence.md."
    )
    found = regime(of(success=0.0), {"replay": {"hindsight": {"enable": True}}})
    assert found is not None and "Hindsight is on" in found.text  # and not: switch it on
