from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from xml.dom import minidom

import pytest
from replay.report.panels import panel_groups
from replay.report.report_page import ReportData, render_report
from replay.report.series import shown_series
from replay.report.svg import HEIGHT, WIDTH, Axis, Curve, bar_chart, line_chart, number
from replay.report.tiles import duration

from agentloop.config import RunConfig
from agentloop.config.config_file import to_plain
from agentloop.runs.run_report import report_run
from context.authors import default_authors
from replay.records import RunRecord
from replay.store import ReplayStore

TWO_STREAMS = {
    "rollout/success": [(1, 0.2), (2, 0.5), (3, 0.9)],
    "eval/success": [(0, 0.172), (3, 0.961)],
    "rollout/reward": [(1, 0.2), (2, 0.5), (3, 0.9)],
    **{
        f"actor/{stream}/{name}": [(1, 1.0), (2, 1.1), (3, 1.2)]
        for stream in ("fresh", "replay")
        for name in ("pg_loss", "pg_clipfrac", "ratio_mean", "ratio_max", "drift_mean", "drift_max", "ess")
    },
    **{f"actor/replay/ess/age_{age}": [(2, 0.9), (3, 0.8)] for age in ("1", "16-31", "2-3", "unknown")},
    "actor/entropy": [(1, 0.9), (2, 0.8), (3, 0.7)],
    "actor/grad_norm": [(1, 0.4), (2, 0.5), (3, 0.6)],
    "replay/staleness_mean": [(2, 1.0), (3, 1.5)],
    "replay/staleness_max": [(2, 1.0), (3, 2.0)],
    "batch/planned_fresh": [(1, 96.0), (2, 96.0), (3, 96.0)],
    "batch/planned_replay": [(1, 32.0), (2, 32.0), (3, 32.0)],
    **{f"batch/{name}_fraction": [(1, 0.0), (2, 0.25), (3, 0.25)] for name in ("ruled", "achieved")},
    "batch/fraction": [(1, 0.25), (2, 0.25), (3, 0.25)],
    "batch/fresh": [(1, 128.0), (2, 96.0), (3, 96.0)],
    "batch/replay": [(1, 0.0), (2, 32.0), (3, 32.0)],
    "rollout/stop/answered": [(1, 0.75), (2, 1.0), (3, 1.0)],
    "rollout/stop/max_turns": [(1, 0.25)],
    "rollout/failed_calls": [(1, 0.5), (2, 0.25), (3, 0.0)],
    **{f"time/{phase}": [(1, 0.5), (2, 0.5), (3, 0.5)] for phase in ("collect", "draw", "update", "publish")},
    "time/reply": [(1, 0.02), (2, 0.02), (3, 0.02)],
    **{f"time/tool/{name}": [(1, 0.5), (3, 0.4)] for name in ("lookup", "search")},
    **{f"reward/{part}": [(1, 0.2), (2, 0.5), (3, 0.9)] for part in ("environment", "brevity")},
    "time/iteration": [(1, 36.0), (2, 36.0), (3, 36.0)],
    "speed/tokens_per_second": [(1, 2e4), (2, 2.1e4), (3, 2.2e4)],
}  # fmt: skip


CONFIG = RunConfig.model_validate(
    {
        "run": {"seed": 7, "iterations": 60, "stop_at_success": 0.95},
        "replay": {"fraction": 0.25, "schedule": {"shape": "linear", "final": 0.0}},
    }
)


def page(
    metrics: object = TWO_STREAMS,
    *,
    name: str = "quickstart-001",
    text: str = "run: {}",
    config: RunConfig = CONFIG,
) -> str:
    assert isinstance(metrics, dict)
    return render_report(ReportData(name, "0.1.0", metrics, text, to_plain(config)))


def text_of(html: str) -> str:
    """What a reader sees, tags and titles dropped."""
    body = re.sub(r"<(style|title)\b.*?</\1>", " ", html, flags=re.S)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))


def panel_of(html: str, title: str) -> str:
    return next(f for f in re.findall(r"<figure.*?</figure>", html, re.S) if f"<h3>{title}</h3>" in f)


class WellFormed(HTMLParser):
    """Every tag that is opened is closed, in order."""

    VOID = frozenset({"meta", "line", "path", "rect", "circle"})

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID or (tag == "rect" and dict(attrs).get("class") == "hit"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_report_heads_with_success_duration_and_rows() -> None:
    seen = text_of(page())
    assert "quickstart-001" in seen
    assert "17.2 % \u2192 96.1 %" in seen
    assert "1 min 48 s" in seen  # 3 iterations of 36 s
    assert "3 of at most 60 iterations" in seen
    assert "320 fresh + 64 replayed" in seen  # 128 + 96 + 96 fresh, 32 + 32 replayed
    assert "16.7 % from the buffer, configured 25.0 %" in seen  # 64 and 96 of 384


@pytest.mark.parametrize(
    ("replay", "told"),
    [
        (
            {"fraction": 0.25, "schedule": {"shape": "linear", "final": 0.0}},
            "replay 25 % falling to 0 %, success sampler",
        ),
        ({"fraction": 0.25}, "replay 25 %, success sampler"),
        (
            {"fraction": 0.0, "schedule": {"shape": "linear", "final": 0.5}},
            "replay 0 % rising to 50 %, success sampler",
        ),
        ({"fraction": 0.5, "mode": "observe"}, "replay 50 %, success sampler, observed only"),
        ({"fraction": 0.5, "unit": "group", "successful_only": False}, "replay 50 %, unit group, success sampler"),
        ({"fraction": 0.0}, "no replay"),
    ],
)
def test_report_names_its_setting_in_one_line(replay: dict[str, object], told: str) -> None:
    run = {"seed": 7, "iterations": 60, "stop_at_success": 0.95}
    seen = text_of(page(config=RunConfig.model_validate({"run": run, "replay": replay})))
    assert f"seed 7 \u00b7 {told} \u00b7 ends at 95 % held-out success twice in a row" in seen


def test_report_shows_every_panel_with_how_to_read_it() -> None:
    html = page()
    titles = re.findall(r"<h3>(.*?)</h3>", html)
    assert titles == [
        "Success", "Reward",
        "Policy loss", "Clip fraction", "Entropy", "Gradient norm",
        "Ratio", "Largest ratio", "Drift", "Largest drift", "Effective sample size",
        "Effective sample size by age", "Staleness of replayed rows",
        "Batch composition", "Mixing ratio", "Episodes cut short", "Failed tool calls",
        "Seconds per iteration", "Tokens per second",
        "Parts of the reward", "Seconds of a turn",
    ]  # fmt: skip
    assert html.count('<p class="how">') == 21
    assert html.count('<svg class="chart"') == 21
    assert "Not measured" not in html
    assert "Negative = raising rewarded actions" in panel_of(html, "Policy loss")
    assert "persistently very negative or positive is not" in panel_of(html, "Policy loss")


def test_report_shows_the_effective_sample_size_of_each_age_the_youngest_first() -> None:
    panel = panel_of(page(), "Effective sample size by age")
    assert re.findall(r"</svg>([^<]*) <b>80 %</b>", panel) == ["1", "2-3", "16-31", "unknown"]


@pytest.mark.parametrize("successful_only", [True, False])
def test_report_explains_a_policy_loss_below_zero_when_only_successes_are_drawn(successful_only: bool) -> None:
    config = RunConfig.model_validate({"replay": {"fraction": 0.25, "successful_only": successful_only}})
    told = "replay lies below 0 as it should" in panel_of(page(config=config), "Policy loss")
    assert told is successful_only


def test_report_shows_stop_reasons_but_answers_with_zero_where_none_occurred() -> None:
    panel = panel_of(page(), "Episodes cut short")
    assert "answered" not in panel
    assert "max_turns <b>0 %</b>" in panel  # 25 % in the first iteration, none since
    assert "<title>iteration 1\nmax_turns: 25 %</title>" in panel


def test_report_of_a_run_where_every_episode_answered_shows_a_flat_zero() -> None:
    metrics = {name: series for name, series in TWO_STREAMS.items() if name != "rollout/stop/max_turns"}
    metrics["rollout/stop/answered"] = [(1, 1.0), (2, 1.0)]
    panel = panel_of(page(metrics), "Episodes cut short")
    assert "other <b>0 %</b>" in panel
    assert '<rect class="bar s0" x=' not in panel


@pytest.mark.parametrize(("largest", "drawn"), [(0.6, True), (0.16, False)])
def test_report_draws_the_gradient_limit_only_near_the_curve(largest: float, drawn: bool) -> None:
    panel = panel_of(page({**TWO_STREAMS, "actor/grad_norm": [(1, 0.02), (2, largest)]}), "Gradient norm")
    assert ('class="reference"' in panel) is drawn
    assert ("(1, far above the curve)" in panel) is not drawn


@pytest.mark.parametrize("title", ["Policy loss", "Clip fraction", "Ratio", "Drift", "Effective sample size"])
def test_report_draws_both_streams_on_shared_axes(title: str) -> None:
    panel = panel_of(page(), title)
    assert 'class="curve fresh"' in panel
    assert 'class="curve replay"' in panel
    assert panel.count('<svg class="chart"') == 1


@pytest.mark.parametrize(
    ("title", "curves"),
    [
        ("Parts of the reward", {"brevity": "s0", "environment": "s1"}),
        ("Seconds of a turn", {"reply": "fresh", "lookup": "s0", "search": "s1"}),
    ],
)
def test_report_draws_each_part_of_the_reward_and_each_tool(title: str, curves: dict[str, str]) -> None:
    panel = panel_of(page(), title)
    assert all(f">{name}" in panel for name in curves)
    assert set(re.findall(r'class="curve (\w+)"', panel)) == set(curves.values())


def test_report_of_a_plain_reward_and_no_tools_has_no_such_panels() -> None:
    plain = {name: series for name, series in TWO_STREAMS.items() if not name.startswith(("reward/", "time/tool/"))}
    assert "One by one" not in page(plain)


def test_report_is_self_contained() -> None:
    html = page()
    tags = WellFormed(html).tags
    assert {tag for tag, _ in tags}.isdisjoint({"script", "link", "img", "iframe", "object", "base", "form"})
    assert not [name for _, attrs in tags for name in attrs if name in ("src", "href", "srcset") or name[:2] == "on"]
    assert "url(" not in html
    assert "@import" not in html
    assert "http" not in html.replace("http-equiv", "")
    assert "default-src 'none'" in html


def test_report_serves_dark_mode_and_phones() -> None:
    html = page()
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html
    assert "@media (max-width: 560px)" in html


def test_report_escapes_all_text() -> None:
    evil = "</pre><script>alert(1)</script>\"'&"
    metrics = {**TWO_STREAMS, f"rollout/stop/{evil}": [(1, 0.5)]}
    html = page(metrics, name=evil, text=evil)
    assert "<script" not in html
    WellFormed(html)
    assert html.count("&lt;script&gt;") >= 4  # title, heading, config, legend, summary


def test_report_without_replay_says_so_where_a_curve_would_be() -> None:
    metrics = {name: v for name, v in TWO_STREAMS.items() if "/replay/" not in name and name[:7] != "replay/"}
    metrics["batch/replay"] = [(1, 0.0), (2, 0.0), (3, 0.0)]
    html = page(metrics)
    assert "replay: not measured" in panel_of(html, "Drift")
    staleness = panel_of(html, "Staleness of replayed rows")
    assert "Not measured in this run" in staleness
    assert "Nothing was drawn from the buffer" in staleness
    assert html.count("Not measured in this run") == 2  # staleness, and the effective sample size by age


@pytest.mark.parametrize("metrics", [{}, {"eval/success": [(0, 0.1)]}, {"actor/entropy": [(1, float("nan"))]}])
def test_report_of_a_run_that_ended_at_once_is_whole(metrics: object) -> None:
    html = page(metrics)
    WellFormed(html)
    assert "Not measured in this run" in html
    assert "nan" not in text_of(html)


def test_report_of_a_long_run_stays_small() -> None:
    long = {name: [(i, 0.5) for i in range(1, 20_001)] for name in TWO_STREAMS}
    assert len(page(long)) < 1_000_000


def coordinates(svg: str) -> list[float]:
    found: list[float] = []
    for element in minidom.parseString(svg).getElementsByTagName("*"):
        for name, limit in (("x", WIDTH), ("cx", WIDTH), ("y", HEIGHT), ("cy", HEIGHT)):
            if element.hasAttribute(name):
                found.append(float(element.getAttribute(name)) / limit)
        numbers = [float(n) for n in re.findall(r"-?[\d.]+", element.getAttribute("d"))]
        found += [n / WIDTH for n in numbers]
    return found


@pytest.mark.parametrize(
    "values", [[0.0], [1.0, 1.0], [1e-9, 2e-9], [-5.0, 5.0], [1e12, -1e12], [1.0, 1e6], [0.999999, 1.0000001]]
)
@pytest.mark.parametrize("axis", [Axis(), Axis(from_zero=True), Axis(reference=1.0, log_if_wide=True)])
def test_line_chart_keeps_every_value_inside_its_frame(values: list[float], axis: Axis) -> None:
    svg = line_chart([Curve("a", list(enumerate(values)), "fresh")], axis, summary="s")
    assert all(0.0 <= place <= 1.0 for place in coordinates(svg))


def test_line_chart_places_values_in_order() -> None:
    svg = line_chart([Curve("a", [(0, 0.0), (1, 0.5), (2, 1.0)], "fresh")], Axis(whole=True), summary="s")
    marks = re.findall(r'<circle class="mark fresh" cx="([\d.]+)" cy="([\d.]+)"', svg)
    xs, ys = [float(x) for x, _ in marks], [float(y) for _, y in marks]
    # The frame: x 62 .. 550 less 8 on either side, y 26 (100 %) .. 226 (0 %).
    assert xs == [70.0, 306.0, 542.0]
    assert ys == [226.0, 126.0, 26.0]


def test_bar_chart_stacks_layers_from_the_floor() -> None:
    layers = [Curve("fresh", [(1, 0.75)], "fresh"), Curve("replay", [(1, 0.25)], "replay")]
    svg = bar_chart(layers, Axis(whole=True), summary="s")
    bars = re.findall(r'<rect class="bar (\w+)"[^>]* y="([\d.]+)"[^>]* height="([\d.]+)"', svg)
    # 200 units high: 150 of fresh from the floor at 226, 50 of replay above it.
    assert bars == [("fresh", "76.0", "150.0"), ("replay", "26.0", "50.0")]


def tick_texts(series: list[tuple[int, float]], axis: Axis) -> list[str]:
    """The labels of the vertical axis, bottom first."""
    svg = line_chart([Curve("a", series, "fresh")], axis, summary="s")
    return re.findall(r'<text class="tick end"[^>]*>([^<]*)</text>', svg)


@pytest.mark.parametrize(
    ("values", "axis", "shown"),
    [
        # Rounding noise around 1 stays a flat line on a readable scale.
        ((1.0, 1.000001), Axis(reference=1.0, least_span=0.02), ["0.99", "0.995", "1", "1.005", "1.01"]),
        ((1.0, 1.035), Axis(reference=1.0, least_span=0.02), ["1", "1.01", "1.02", "1.03"]),
        # Labels grow digits until no two are alike.
        ((1000.0, 1000.5), Axis(), ["1000", "1000.2", "1000.4"]),
        ((1.0, 19.0), Axis(log_if_wide=True), ["1", "2", "5", "10", "20"]),
        ((1.0, 9.0), Axis(log_if_wide=True), ["2", "4", "6", "8"]),
        ((1e-4, 90.0), Axis(log_if_wide=True), ["0.0001", "0.01", "1", "100"]),
        ((1.0, 20000.0), Axis(log_if_wide=True), ["1", "10", "100", "1000", "1e+04"]),
        ((0.0, 0.03), Axis(percent=True, from_zero=True), ["0 %", "1 %", "2 %", "3 %"]),
        ((0.0, 22000.0), Axis(from_zero=True), ["0", "5k", "10k", "15k", "20k"]),
        ((0.0, 0.0), Axis(percent=True, from_zero=True, least_span=0.04), ["0 %", "1 %", "2 %", "3 %", "4 %"]),
    ],
)
def test_line_chart_chooses_a_scale_for_its_values(values: tuple[float, float], axis: Axis, shown: list[str]) -> None:
    assert tick_texts(list(enumerate(values)), axis) == shown


def test_chart_names_what_its_axis_counts() -> None:
    svg = line_chart([Curve("a", [(1, 0.5)], "fresh")], Axis("nats per token"), summary="s")
    assert ">nats per token</text>" in svg


def test_chart_tells_every_value_on_hover() -> None:
    curves = [Curve("fresh", [(4, 0.25)], "fresh"), Curve("replay", [(4, 0.5)], "replay")]
    assert "<title>iteration 4\nfresh: 0.25\nreplay: 0.5</title>" in line_chart(curves, Axis(), summary="s")


def test_chart_of_a_long_run_keeps_its_peaks() -> None:
    series = [(i, 1.0) for i in range(1, 2401)]
    series[1234] = (1235, 500.0)
    svg = line_chart([Curve("max", series, "fresh", peak=True)], Axis(log_if_wide=True), summary="s")
    assert "max: 500" in svg


class Numbered(Mapping[str, list[tuple[int, float]]]):
    """Every metric has one point: the place of its name among those that were asked for."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getitem__(self, name: str) -> list[tuple[int, float]]:
        self.names += [] if name in self.names else [name]
        return [(1, float(self.names.index(name)))]

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def test_largest_values_are_merged_as_such_in_files_and_pages_alike() -> None:
    metrics = Numbered()
    panels = [panel for group in panel_groups(metrics, {}) for panel in group.panels]
    curves = [curve for panel in panels for curve in panel.curves if curve.series]
    peaks = {metrics.names[int(curve.series[0][1])]: curve.peak for curve in curves}
    assert any(peaks.values())
    assert {name: name.endswith("_max") for name in peaks} == peaks


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (0.0333333, "0.0333"),
        (1234567.0, "1.2e+06"),
        (12345.0, "12,345"),
        (-0.00002, "-2e-05"),
        (96.0, "96"),
    ],
)
def test_number_is_short(value: float, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("share", "shown"), [(0.9609, "96.1 %"), (1.0, "100 %"), (0.99983, "99.983 %"), (0.0, "0 %"), (0.0155, "1.55 %")]
)
def test_number_of_a_share_is_whole_only_when_nothing_is_missing(share: float, shown: str) -> None:
    assert number(share, percent=True) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(3.21, "3.2 s"), (48, "48 s"), (108, "1 min 48 s"), (11520, "3 h 12 min")]
)
def test_duration_is_told_in_two_units(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def stored_run(folder: Path, config: dict[str, object]) -> ReplayStore:
    authors = default_authors()
    store = ReplayStore.create(folder / "replay.sqlite")
    store.add_run(RunRecord("run-a", "quickstart-001", config, authors.to_json(), authors.hash, "0.1.0"))
    store.add_metrics("run-a", 0, {"eval/success": 0.25})
    store.add_metrics("run-a", 4, {"eval/success": 0.5, "actor/grad_norm": 0.3})
    return store


def test_report_of_a_single_evaluation_claims_no_change() -> None:
    seen = text_of(page({"eval/success": [(0, 0.172)]}))
    assert "17.2 % at iteration 0, evaluated once" in seen
    assert "\u2192" not in seen


def test_report_of_another_version_leaves_out_what_its_configuration_does_not_say() -> None:
    plain = {"run": {"seed": 7}, "replay": {"fraction": 0.25, "schedule": "linear", "successful_only": "yes"}}
    html = render_report(ReportData("old-001", "0.0.1", TWO_STREAMS, "", plain))
    assert '<p class="setting">seed 7</p>' in html  # how long it was to be is not told, so no share of its last batch
    assert "3 iterations, 36 s each" in text_of(html)
    assert ">loss</text>" in panel_of(html, "Policy loss")
    assert "replay lies below 0" not in panel_of(html, "Policy loss")
    assert '<p class="setting">' not in render_report(ReportData("old-001", "0.0.1", {}, "", {}))


def test_report_asks_for_every_metric_it_shows_and_for_no_other(tmp_path: Path) -> None:
    store = stored_run(tmp_path, {})
    for name, series in TWO_STREAMS.items():
        for iteration, value in series:
            store.add_metrics("run-a", 10 + iteration, {name: value, "actor/fresh/ratio_p01": 0.5})
    found = shown_series(store, "run-a")
    store.close()
    assert found.keys() == TWO_STREAMS.keys()


def test_write_report_replaces_the_page_whole(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("old")
    store = stored_run(tmp_path, to_plain(RunConfig()))
    path = report_run(store, tmp_path / "report.html")
    store.close()
    html = path.read_text(encoding="utf-8")
    assert "25.0 % \u2192 50.0 %" in text_of(html)
    assert "fraction: 0.0" in html
    assert "optimizer.max_grad_norm (1, far above the curve)" in panel_of(html, "Gradient norm")
    assert not list(tmp_path.glob("*.tmp"))


def test_write_report_shows_the_configuration_of_another_version_as_stored(tmp_path: Path) -> None:
    store = stored_run(tmp_path, {"replay": {"forgotten_key": 3}})
    html = report_run(store, tmp_path / "report.html").read_text(encoding="utf-8")
    store.close()
    assert "&quot;forgotten_key&quot;: 3" in html
