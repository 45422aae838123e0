"""Pages of runs that agentloop has not trained, or not from episodes, say what their tables know and nothing else."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from replay import ReplayStore, questions
from replay.exchange import export_file, import_file
from replay.questions import Query
from tests.fakes.records import RUN, Fresh, a_run, add_draw, iterated, new_store, put, sql, trajectory
from tests.replay.pages.serving import Served, charts_of, inspecting

HERE = f"/runs/{RUN}"


def absent(server: Served, address: str = HERE) -> dict[str, str]:
    """Why curves are missing, by the panel and the curve."""
    charts = charts_of(server.page(address)).items()
    return {f"{key}, {each['label']}": each["absent"] for key, of in charts for each in of["curves"] if each["absent"]}


def test_page_of_a_trainer_of_one_s_own_that_logs_nothing_shows_its_batches_groups_and_draws(tmp_path: Path) -> None:
    store = iterated(tmp_path / "replay.sqlite", sampler="success", count=3)
    with closing(store), inspecting(store) as server:
        words, html = server.words(HERE), server.page(HERE)
        store.roles.end_run(RUN)
        assert "finished after iteration 3 code version" in server.words(HERE)
        missing, mixing = absent(server), server.words(f"/mixing?run={RUN}")
        shares = absent(server, f"{HERE}/replayed")
    for part in (
        "live, iteration 3",
        "training success 37.5 % (newest 3 iterations)",  # (2 + 1) / 8
        # 24 rows in 6 groups; nothing is drawn in the first iteration, three rows in both others.
        "24 fresh + 6 replayed trajectories in batches, 20.0 % from the buffer, configured 20.0 %",
        "groups without signal 0.0 % of 6 in the buffer 24 rows, 24 eligible",
        "not measured 3 iterations were made; no time/iteration was logged.",
    ):
        assert part in words, part
    charts = {key: [curve["points"] for curve in panel["curves"]] for key, panel in charts_of(html).items()}
    assert charts["success"][0] == [[1, 0.375], [2, 0.375], [3, 0.375]]
    assert charts["batch-composition"] == [[[1, 8], [2, 8], [3, 8]], [[1, 0], [2, 3], [3, 3]]]
    # Each of the fakes' episodes has two turns and six tokens.
    assert [charts[f"{of}-of-an-episode"][0][-1] for of in ("turns", "length")] == [[3, 2.0], [3, 6.0]]
    assert charts["staleness-of-replayed-rows"][1][0] == [2, 1]
    assert charts["drift"][1] == [[2, 1.1], [3, 1.1]] and charts["largest-gap"][1] == [[2, 1.5], [3, 1.5]]
    assert "Only what it logged or stored has a chart." in words and "ratio" not in charts
    assert missing["drift, fresh"] == "No finished iteration logged it."
    assert not [why for why in (*missing.values(), *shares.values()) if "Nothing was drawn" in why]
    assert "by its defaults, not what the run's own trainer draws" in mixing


def test_pages_of_a_trainer_that_stores_only_which_rows_went_in_say_what_is_not_known(tmp_path: Path) -> None:
    with closing(iterated(tmp_path / "replay.sqlite", 1)) as store:
        put(store, trajectory("of-my-trainer-1-10", group="other", slot=8))
        add_draw(store, "of-my-trainer-1-10", slot=8)
        sql(store, "update draws set advantage = null, drift_mean = null, token_gap_max = null")
        with inspecting(store) as server:
            words, cost = server.words(f"{HERE}/iterations/1"), server.words(f"{HERE}/cost")
    assert "The run logged no ratio and no drift of this iteration." in words and "quantity stream" not in words
    assert "The update stored no advantages of its own: these are the stored rows'." in words
    assert words.count("+0.50") == 9
    assert "of-my-trainer-1-10" in words
    assert "The run logged no seconds, such as time/iteration" in cost and "Type a price above" in cost


def test_groups_without_signal_are_those_that_all_failed_and_those_that_all_solved(tmp_path: Path) -> None:
    with closing(new_store(tmp_path / "replay.sqlite")) as store:
        fresh = Fresh(1, rates=(0.0, 0.0, 1.0, 0.5))
        fresh.groups = [replace(each, reward_std=0.5 * (each.success_rate == 0.5)) for each in fresh.groups]
        fresh.append_to(store)
        with inspecting(store) as server:
            curves = charts_of(server.page(HERE))["groups-without-signal"]["curves"]
    assert [(each["label"], each["points"]) for each in curves] == [
        ("without signal", [[1, 0.75]]),
        ("of these all failed", [[1, 0.5]]),
        ("of these all solved", [[1, 0.25]]),
    ]


def test_page_of_imported_rows_says_that_nothing_was_trained_here(tmp_path: Path) -> None:
    with closing(iterated(tmp_path / "made.sqlite")) as store:
        store.add_run(replace(a_run(), config={"run": {"iterations": 3}}))
        export_file(store, tmp_path / "rows.jsonl")
    with closing(ReplayStore.create(tmp_path / "replay.sqlite")) as store:
        import_file(store, tmp_path / "rows.jsonl", name=None)
        with inspecting(store) as server:
            words, listed, missing = server.words(HERE), server.words("/?all=1"), absent(server)
            id = questions.page(store, Query(RUN))["rows"][0]["id"]
            updates, reasons = server.words(f"/trajectories/{id}?view=updates"), absent(server, f"{HERE}/replayed")
            replayed, held_out = (server.words(f"{HERE}/{name}") for name in ("replayed", "held-out"))
    for part in (
        "imported code version",
        "No update is stored here These rows came from a file or another buffer: nothing was trained here.",
        "collected success 37.5 % (newest 3 iterations)",
        "of a file of successes it is too high",
        "not measured This database holds no evaluation of the run.",
        "none This database holds no finished iteration of the run. groups without signal 0.0 % of 6",
        "in the buffer 24 rows, 24 eligible",
    ):
        assert part in words, part
    assert "quickstart-001 imported" in listed.replace(f"{RUN[:10]} ", "")
    assert set(missing) == {"success, held-out"}  # panels without a curve are left out
    assert "used by no update of this database" in updates and "This database holds no committed draw of it." in updates
    assert "This database holds no update of the run." in replayed
    assert {*reasons.values()} == {"No finished iteration logged it."}
    assert "This database holds no episode of an evaluation" in held_out


def test_page_of_a_recording_says_that_a_gateway_made_it(tmp_path: Path) -> None:
    with closing(new_store(tmp_path / "replay.sqlite")) as store:
        recording = {"gateway": {"model": "m", "text": False, "upstream_model": None}}
        store.add_run(replace(a_run(), config=recording))
        Fresh(0, source="gateway", version=0).append_to(store)
        with inspecting(store) as server:
            words = server.words(HERE)
    assert "recorded code version" in words and "A gateway recorded these rows: nothing was trained here." in words
    assert "collected success 50.0 %" in words and "in the buffer 4 rows, 4 eligible" in words
