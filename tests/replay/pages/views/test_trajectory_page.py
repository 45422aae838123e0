import html
import json
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from context.messages import Message, ToolCall, conversation_text, plain_message
from context.tokens.token_sequence import Segment
from replay import ReplayStore
from replay.open_buffer import OpenBuffer, open_buffer
from replay.pages.addresses import address
from replay.pages.commands import rescore_command
from replay.pages.conversation_text import fold_text, indent_json
from replay.pages.views.trajectory_page import codec_of, unread
from replay.storage.format import schema
from tests.fakes.random_agents import planned_session
from tests.fakes.records import RUN, add_run, iterate, new_store, planned_row, put, session_row, sql, trajectory
from tests.replay.pages.serving import Served, charts_of, inspecting
from tests.replay.questions.test_summary import FIRST, THEN

SPLIT = Segment(FIRST), Segment(THEN, "strategy_rewrite")
LONG = "x" * 1_000_000
JSON = '{"next": "amber", "next": 1.50e3, "note": "' + "and so on " * 10 + '\\u0041", "empty": []}'
SAID = (
    Message("system", "You look things up.", author="initialization"),
    Message("user", "\nWhere is the key?"),
    Message("assistant", "", author="llm", tool_calls=(ToolCall("lookup", {"key": float("nan")}),), reasoning="hm"),
    Message("tool", JSON, author="env", name="lookup"),
    Message("assistant", "again", author="llm", reward=0.25),
    Message("tool", LONG, author="env", name="lookup", error_kind="raised"),
    Message("assistant", "in the drawer", author="llm"),
)


def identify(folder: Path) -> None:
    identity = {"id": RUN, "name": "a run", "config": {"replay": {"database": None}}}
    (folder / "run.json").write_text(json.dumps(identity))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`split`, `scored` and `gone` of one group, in the folder of a run."""
    path = tmp_path_factory.mktemp("a run")
    identify(path)
    with closing(new_store(path / "replay.sqlite")) as store:
        split = replace(
            trajectory("split", segments=SPLIT, num_turns=3, error_kinds="raised malformed raised"), messages=SAID
        )
        rows = [split, trajectory("scored", member=1, slot=1, reward=0.0), trajectory("gone", member=2, slot=2)]
        put(store, *rows, size=3)
        store.append([], [], [trajectory("broken", member=3, slot=3)])
        current = np.array([np.nan, np.nan, -0.5, -1.5, np.nan, -1.0], np.float32)
        store.add_scores(RUN, 4, {("scored", 0): current})
        store.forget(schema.trajectories.c.id == "gone", dry_run=False)
        sql(store, "update segments set tokens = ? where trajectory = 'broken'", bytes(40))
    return path


@pytest.fixture(scope="module")
def page(folder: Path) -> Iterator[Served]:
    with inspecting(folder / "replay.sqlite", folder, named=str(folder)) as server:
        yield server


def test_page_leads_to_its_group_and_from_the_beginning_of_an_id_to_the_whole(page: Served) -> None:
    shown = page.ask("/trajectories/scored").text
    assert 'href="/trajectories/split" title="Previous of its group (p)"' in shown
    assert 'href="/trajectories/broken" title="Next of its group (n)"' in shown
    assert 'href="/tasks/task-1"' in shown
    response = page.ask("/trajectories/spl?view=tokens&segment=1")
    assert (response.status, response.header("location")) == (303, "/trajectories/split?view=tokens&segment=1")
    assert page.ask("/trajectories/s").status == 404


def test_conversation_is_shown_by_turns(page: Served) -> None:
    shown = page.ask("/trajectories/split").text
    sections = re.findall(r'<section class="turn" id="([a-z0-9-]+)"', shown)
    assert sections == ["opening", "turn-0", "turn-1", "turn-2"]
    text = page.words("/trajectories/split")
    for line in ("◆ llm", "▲ env", "▼ initialization", "calls lookup", '{"key": "nan"}', "in the drawer"):
        assert line in text
    assert "ended by final, tool errors: 2 raised, 1 malformed" in text
    assert re.findall(r'<span class="badge bad">(raised|malformed)</span>', shown) == ["raised"]
    words = re.findall(r'<article class="said by-[a-z]+" aria-label="([a-z ]+)">', shown)
    assert words == ["opening of the task", "user", *["policy", "environment"] * 2, "policy"]
    assert text.count("reward 0.250") == 1
    # A line break at the beginning of <pre> is dropped by browsers: there is one more.
    assert "<pre>\n\nWhere is the key?</pre>" in shown


def test_terminal_names_authors_whom_the_role_does_not_imply_and_rewards_of_replies() -> None:
    others = Message("user", "Ring!", author="env"), Message("assistant", "Hm", author="demonstration", reward=1.0)
    text = conversation_text(map(plain_message, [*SAID[:2], SAID[4], *others]))
    assert [line.partition(":")[0] for line in text.splitlines() if ": " in line] == [
        *("system", "user", "assistant (reward 0.25)", "user (env)", "assistant (demonstration, reward 1)"),
    ]


def test_long_result_is_folded_and_cut(page: Served) -> None:
    shown = page.page("/trajectories/split")
    assert len(shown) < 60_000
    assert "999,200 more characters" in shown
    assert "980,000 further characters are not shown: <code>agentloop replay show split --json</code>" in shown


def test_json_is_laid_out(page: Served) -> None:
    pretty = str(indent_json(JSON))
    assert json.loads(pretty) == json.loads(JSON)
    assert pretty.split("\n")[:2] == ["{", '  "next": 1500.0,'] and pretty.split("\n")[-2:] == ['  "empty": []', "}"]
    for text in ("plain", '{"short": 1}', JSON[:-1], "[" * 9_000 + "]" * 9_000, '{"a": ' + "9" * 90):
        assert indent_json(text) is None
    assert pretty in html.unescape(page.page("/trajectories/split"))


def test_tokens_page_says_why_segments_split_and_what_was_never_scored(page: Served, folder: Path) -> None:
    text = page.words("/trajectories/split?segment=1&color=drift")
    assert "the context strategy changed what was shown of the conversation" in text
    assert "It parts from the conversation before it at token 3" in text
    assert "It was never scored" in text
    assert f"agentloop replay rescore '{folder}' --where \"id == 'split'\"" in text
    assert "No tokenizer lies beside the database" in text
    scored = page.words("/trajectories/scored?view=tokens")
    assert "never scored" not in scored
    assert "Current log-probs are those of policy 4" in scored


def test_corrupt_row_shows_the_error_and_nothing_else(page: Served) -> None:
    text = page.words("/trajectories/broken")
    assert "It does not read back as it was written" in text
    assert "tokens with a wrong header" in text
    assert "in the drawer" not in text
    response = page.ask("/trajectories/broken/tokens.json")
    assert response.status == 404
    assert "must read back as it was written" in json.loads(response.text)["error"]


def test_forgotten_row_says_what_is_left_of_it(page: Served) -> None:
    for view in ("conversation", "tokens", "updates"):
        text = page.words(f"/trajectories/gone?view={view}")
        assert "This trajectory was evicted (forgotten)" in text
        assert "member 3 of 3" in text
        assert "No update of this database used it" in text


def test_every_update_is_a_line_of_a_table(file_store: ReplayStore) -> None:
    at = [(iteration, id) for iteration in range(1, 4) for id in iterate(file_store, iteration, count=3)]
    drawn = [id for _, id in at]
    with inspecting(file_store) as server:
        shown = server.ask(address("trajectories", drawn[0], view="updates")).text
        words = server.words(address("trajectories", drawn[0], view="updates"))
    assert shown.count('<span class="badge replay">') == drawn.count(drawn[0])
    assert shown.count("<td>1.1000</td>") == shown.count('<tr data-href="/runs/')  # every mean drift
    times = [iteration for iteration, id in at if id == drawn[0]]
    used = f"used by {1 + len(times)} updates"
    life = (
        f"Sampled in iteration 1 by policy 0; {used} ({len(times)} as replay), in iterations 1 to {times[-1]}; it can"
    )
    assert f"{life} still be drawn after iteration 3, the newest." in words
    # The list counts replays alone.
    assert words.count(f"{used}, in {len(times)} of them as replay") == 2
    fresh, replayed = charts_of(shown)["drift-of-the-row"]["curves"]
    assert (fresh["points"], replayed["points"]) == ([[1, 1.1]], [[iteration, 1.1] for iteration in times])
    assert charts_of(shown)["weight-of-the-row"]["curves"][0]["points"] == [[1, 1.0]]
    assert 'data-marks="[[1, &#34;sampled&#34;], [3, &#34;can still be drawn&#34;]]"' in shown


def test_session_of_an_agent_is_a_tree_with_what_each_request_added(file_store: ReplayStore) -> None:
    put(file_store, planned_row("agents"))
    with inspecting(file_store) as server:
        shown, text = server.page("/trajectories/agents"), server.words("/trajectories/agents")
        for line in (
            "0 ● planner new trained 0 27 6 1",
            "1 ● planner goes on from 0 trained",
            "2 │ ● searcher new trained 5 31 6 0",
            "4 ● planner edited, from 0 trained 14 22 7 2",
            "7 ● searcher new refused 3 14 0 –",
        ):
            assert line in text
        assert re.findall(r'href="#turn-(\d)"', shown) == re.findall(r'id="turn-(\d)"', shown) == [*"01234567"]
        assert 'href="/trajectories/agents?view=tokens&amp;segment=2"' in shown
        asked = re.search(r'id="turn-2".*?</section>', shown, re.S)
        assert asked is not None and "You look things up." in asked[0] and "searcher, new, trained" in asked[0]
        assert re.search(r'id="end".*?done.*?</section>', shown, re.S) is not None
        why = server.words("/trajectories/agents?view=tokens&segment=1")
        assert "did not go on from the reply before it" in why and "requests 0, 1, 3" in why


def test_long_session_is_shown_some_requests_at_a_time(file_store: ReplayStore) -> None:
    nodes = [replace(planned_session()[0], number=number) for number in range(70)]
    put(file_store, session_row("long", nodes=nodes, agent_rewards='{"scout":[0.5,-0.25]}'))
    with inspecting(file_store) as server:
        shown = server.page("/trajectories/long?turn=65")
    assert re.findall(r'id="turn-(\d+)"', shown) == [str(number) for number in range(60, 70)]
    assert "&#34;scout&#34;:[0.5,-0.25]" in shown
    assert "60–69" in shown and 'href="#turn-59"' not in shown


def test_rescore_command_can_be_typed_whatever_the_names_are(folder: Path, tmp_path: Path) -> None:
    with closing(ReplayStore.open(folder / "replay.sqlite", read_only=True)) as store:
        source = OpenBuffer(store, folder, named="runs/a-1")
        assert rescore_command(source, "3f9a") == "agentloop replay rescore runs/a-1 --where \"id == '3f9a'\""
        assert rescore_command(source, "a'b$c") == ("agentloop replay rescore runs/a-1 --where 'id == \"a'\"'\"'b$c\"'")
        assert rescore_command(OpenBuffer(store, None, named="postgresql://h/d"), "a") is None
        assert rescore_command(OpenBuffer(store, tmp_path, named=str(tmp_path)), "a") is None


@pytest.mark.parametrize("text", ["", "short", "line\n" * 100, LONG, "a" * 700 + "\n" * 30])
def test_folded_text_is_the_text(text: str) -> None:
    parts = fold_text(text)
    assert parts.head + parts.rest == text[: len(text) - parts.left]
    assert parts.left == max(0, len(text) - 20_000)


def test_tokens_are_spelled_only_by_the_tokenizer_they_were_written_with(tmp_path: Path) -> None:
    identify(tmp_path)
    with closing(new_store(tmp_path / "replay.sqlite")) as store:
        for run, tokenizer in (("run-2", "tok"), ("run-3", "other")):
            add_run(store, run, tokenizer=tokenizer)
        assert "a database was opened" in str(unread(OpenBuffer(store), RUN))
    with open_buffer(str(tmp_path)) as source:
        assert "No tokenizer lies beside the database" in str(unread(source, RUN))
        # One that is written after the database is found.
        (tmp_path / "start").mkdir()
        written = Tokenizer(models.WordLevel({"a": 0, "\u00e9": 1}, unk_token="a")).to_str()
        (tmp_path / "start" / "tokenizer.json").write_text(written, encoding="utf-8")
        assert [unread(source, run) for run in (RUN, "run-2")] == [None, None]
        found = codec_of(source)("run-2")
        assert found is not None and found.decode([1]) == "\u00e9" and codec_of(source)(RUN) is found
        assert codec_of(source)("run-3") is None
        assert "run-3, which is not known to have the tokenizer" in str(unread(source, "run-3"))
