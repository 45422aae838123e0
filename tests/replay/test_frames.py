"""DataFrames hold what the store and the questions say, on every kind of database."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

import replay
from context.authors import ENV, LLM
from context.messages import Message
from context.tokens.token_sequence import Segment
from replay import Buffer, CorruptTrajectory, ReplayError, ReplayStore, questions
from replay.frames import arrow_rows
from replay.questions import Query
from replay.storage.format.column_types import to_storable
from tests.fakes.databases import Databases
from tests.fakes.records import RUN, new_store, put, sql, tokens, trajectory
from tests.replay.storage.filled_buffers import fill

pytestmark = pytest.mark.every_database


@pytest.fixture(scope="module")
def opened(databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Buffer, ReplayStore]]:
    """A buffer of rows of every kind, and the store behind it."""
    location = databases.new(tmp_path_factory.mktemp("frames") / "replay.sqlite")
    fill(location)
    store = ReplayStore.open(location, read_only=True)
    with replay.open(location) as buffer:
        yield buffer, store
    store.close()


def with_tokens(store: ReplayStore) -> list[Any]:
    ids = [id for (id,) in sql(store, "select distinct trajectory from segments union select trajectory from nodes")]
    return store.read(ids)


def test_columns_are_those_of_records(opened: tuple[Buffer, ReplayStore], monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, store = opened
    monkeypatch.setattr(arrow_rows, "BATCH_ROWS", 3)
    assert len(list(buffer.trajectories())) > 5
    found = {row["id"]: row for row in buffer.trajectories().to_arrow().to_pylist()}
    listed = {row["id"]: row for row in questions.page(store, Query(), limit=1000)["rows"]}
    assert found.keys() == listed.keys()
    for id, row in listed.items():
        got = {name: found[id][name] for name in found[id].keys() & row.keys()}
        assert got == as_framed({name: value for name, value in row.items() if name in found[id]})
    for whole in with_tokens(store):
        record = {name: known(value) for name, value in vars(whole.record).items() if name in found[whole.id]}
        assert {name: found[whole.id][name] for name in record} == as_framed(record)


def as_framed(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"error_kinds": row["error_kinds"] and row["error_kinds"].split(" ")}


def known(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def test_a_view_says_what_the_columns_say(opened: tuple[Buffer, ReplayStore]) -> None:
    buffer, _ = opened
    ours = buffer.trajectories().to_arrow().sort_by("id")
    view = buffer.sql("select * from v_trajectories order by id").to_arrow().select(ours.schema.names)
    assert view.schema.equals(ours.schema)
    assert view.sort_by("id").equals(ours)


def test_lists_of_tokens_are_what_is_stored_and_null_where_it_is_gone(opened: tuple[Buffer, ReplayStore]) -> None:
    buffer, store = opened
    named = ["author", "id", "token_id", "loss_mask", "behavior_log_prob", "current_log_prob", "token_drift", "segment"]
    rows = {row["id"]: row for row in buffer.trajectories(columns=named).to_arrow().to_pylist()}
    whole = {row.id: row for row in with_tokens(store)}
    assert {id for id, row in rows.items() if row["token_id"] is None} == rows.keys() - whole.keys() != set()
    for id, row in whole.items():
        shown = questions.trajectory(store, id)["segments"]
        for name, key in [("token_id", "token_ids"), ("author", "authors"), ("loss_mask", "loss_mask"),
                          ("behavior_log_prob", "behavior_log_probs")]:  # fmt: skip
            assert rows[id][name] == [value for segment in shown for value in segment[key]], (id, name)
        assert rows[id]["segment"] == [at for at, segment in enumerate(row.segments) for _ in segment.tokens.token_ids]
    long, behavior = rows["long"], np.array(rows["long"]["behavior_log_prob"], float)
    assert long["current_log_prob"] == [0.0] * 6 + [1.0] * 6
    drift = np.exp(np.array(long["current_log_prob"]) - behavior)
    np.testing.assert_allclose(np.array(long["token_drift"], float), drift, rtol=1e-6)


def test_a_row_a_token_or_a_message(opened: tuple[Buffer, ReplayStore]) -> None:
    buffer, store = opened
    lists = buffer.trajectories(where="iteration == 3", columns=["id", "token_id"]).to_arrow().to_pylist()
    tokens = buffer.tokens(where=["iteration == 3", "reward > -9"]).to_polars()
    assert tokens["token_id"].to_list() == [token for row in lists for token in row["token_id"] or ()]
    assert tokens["position"].max() > 0 and tokens["behavior_log_prob"].is_nan().sum() == 0
    said = buffer.messages("'drawer' in text").to_arrow().to_pylist()
    shown = [row for row in with_tokens(store) if any("drawer" in each.content for each in row.messages)]
    found = {(row["trajectory"], row["position"]): row["content"] for row in said}
    assert found == {(row.id, at): to_storable(each.content) for row in shown for at, each in enumerate(row.messages)}


def test_what_else_is_asked_is_a_view(opened: tuple[Buffer, ReplayStore]) -> None:
    buffer, store = opened
    draws = pl.DataFrame(buffer.draws())
    assert draws.select("run", "iteration", "slot", "trajectory", "drift_mean").rows() == sql(
        store, "select run, iteration, slot, trajectory, drift_mean from draws order by run, iteration, slot"
    )
    assert draws["source"].null_count() == draws["task"].null_count() == 0
    assert pa.table(buffer.iterations())["iteration"].to_pylist() == [1, 2, 3]
    assert (RUN, 3, "eval/success", 0.5) in buffer.metrics().to_polars().rows()
    tasks = {(row["run"], row["task"]): row for row in buffer.tasks().to_arrow().to_pylist()}
    tried = questions.task(store, "task-1", RUN)
    mine, groups = tasks[RUN, "task-1"], tried["groups"]
    assert (mine["attempts"], mine["num_groups"]) == (tried["attempts"], tried["groups_in_all"])
    assert mine["success_rate"] == pytest.approx(tried["successes"] / tried["attempts"])
    assert mine["latest_iteration"] == tried["latest_iteration"]
    assert mine["best_success"] == max(group["success_rate"] for group in groups)


def test_a_row_a_token_of_many_tokens(location: Any) -> None:
    """200 bytes of id for each of 100,000 tokens: more than NumPy's texts give one Arrow array."""
    with closing(new_store(location)) as store:
        put(store, trajectory("x" * 200, segments=(Segment(tokens([7] * 100_000, [LLM] * 100_000)),)))
    with replay.open(str(location)) as buffer:
        found = buffer.tokens().to_arrow()
    assert found["trajectory"].value_counts().to_pylist() == [{"values": "x" * 200, "counts": 100_000}]


def test_what_can_not_be_asked_is_one_line(opened: tuple[Buffer, ReplayStore]) -> None:
    buffer, store = opened
    with pytest.raises(ReplayError, match="columns must name columns, got 'turns'. Did you mean num_turns"):
        buffer.trajectories(columns=["turns"])
    for statement, message in [
        ("delete from draws", "begin with select, with, values or explain, got 'delete from"),
        ("select 1; delete from draws", "be one statement"),
        ("with gone as (delete from draws returning 1) select 1 from gone", "be SQL that reads, got one that fails: "),
        ("select nothing", "be SQL that reads, got one that fails: "),
        ("select 1 as a union all select 'x'", "(give values of one type in each column|be SQL that reads), got "),
    ]:
        with pytest.raises(ReplayError, match=f"query must {message}"):
            buffer.sql(statement)
    for columns in ([], "id"):
        with pytest.raises(ReplayError, match="columns must be a list of at least one name"):
            buffer.trajectories(columns=columns)
    assert sql(store, "select count(*) from draws") == [(len(buffer.draws().to_arrow()),)] != [(0,)]


def test_rows_are_those_of_the_moment_and_damage_is_named(location: Any) -> None:
    store = new_store(location)
    put(store, trajectory("a"))
    with replay.open(str(location)) as buffer:
        rows = buffer.trajectories(columns=["id", "token_id"])
        assert len(rows.to_arrow()) == 1
        put(store, trajectory("b", slot=1))
        assert len(rows.to_arrow()) == 2
        assert buffer.label(["b"], "odd", "look again", by="ann") == 1
        assert buffer.trajectories("label == 'odd'", ["id"]).to_arrow().to_pylist() == [{"id": "b"}]
        sql(store, "update segments set tokens = ? where trajectory = 'b'", b"x" * 40)
        with pytest.raises(CorruptTrajectory):
            buffer.tokens().to_arrow()
    store.close()


def test_without_pyarrow_a_line_names_the_extra(tmp_path: Any) -> None:
    new_store(tmp_path / "replay.sqlite").close()
    code = "import sys; sys.modules['pyarrow'] = None\nimport replay; replay.open(sys.argv[1]).draws()"
    asked = subprocess.run([sys.executable, "-c", code, tmp_path / "replay.sqlite"], capture_output=True, text=True)
    assert "DataFrames must have pyarrow installed, got none. Install the extra: pip install" in asked.stderr


def test_calls_labels_runs_and_held_out_episodes_are_frames(opened: tuple[Buffer, ReplayStore]) -> None:
    buffer, store = opened
    calls = buffer.tool_calls("id == 'long'").to_arrow().to_pylist()
    (whole,) = store.read(["long"])
    assert [(row["name"], row["arguments"]) for row in calls] == [
        (call.name, json.dumps(dict(call.arguments))) for message in whole.messages for call in message.tool_calls
    ]
    assert calls[0]["answer"] == to_storable(next(one.content for one in whole.messages if one.role == "tool"))
    assert {row["run"] for row in buffer.runs().to_arrow().to_pylist()} == {RUN, "run-2"}
    assert {*buffer.held_out().to_polars().select("task", "success").rows()} == {("held-out", True)}
    found = {row["task"]: row for row in buffer.tasks().to_arrow().to_pylist()}
    assert (found["task-1"]["environment"], found["task-1"]["question"]) == ("lookup_chain", "Where is the key?")
    assert found["task-1"]["payload"] == '{"hops":2,"store":{"k1":"drawer"}}'


def test_tool_calls_have_unreadable_calls_without_a_name(databases: Databases, tmp_path: Path) -> None:
    location = databases.new(tmp_path / "replay.sqlite")
    unread = Message("assistant", "<call", author=LLM)
    said = (unread, Message("tool", "no JSON", author=ENV, error_kind="malformed"), unread)
    with closing(new_store(location)) as store:
        put(store, trajectory("row", messages=said, error_kinds="malformed malformed"))
    with replay.open(location) as buffer:
        rows = buffer.tool_calls().to_arrow().to_pylist()
    none = {"trajectory": "row", "number": 0, "name": None, "arguments": None, "error_kind": "malformed"}
    assert rows == [{**none, "position": 0, "answer": "no JSON"}, {**none, "position": 2, "answer": None}]


def test_sql_gives_types_by_name_and_takes_parameters(opened: tuple[Buffer, ReplayStore]) -> None:
    buffer, _ = opened
    query = (
        "select id, success, parent, created_at, staleness from v_trajectories where iteration = :at and parent is null"
    )
    asked = buffer.sql(query, at=3).to_arrow()
    assert asked.schema == buffer.trajectories(columns=asked.column_names).schema
    assert str(asked.schema.field("created_at").type) == "timestamp[us, tz=UTC]"
    assert buffer.sql("select avg(reward) as success from v_trajectories").to_arrow().schema.types == [pa.float64()]
    assert str(buffer.trajectories("staleness is None or staleness >= 0").to_pandas()["staleness"].dtype) == "Int64"
