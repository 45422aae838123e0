import json
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from context.authors import ENV, LLM, TEMPLATE, USER
from context.messages import Message, ToolCall
from context.tokens.token_sequence import Segment, TokenSequence
from replay import ReplayStore
from replay.exchange import export_file, import_file, jsonl, parquet
from replay.exchange.row_format import Bundle
from replay.questions.filters import condition
from replay.storage.databases import Location
from tests.fakes.records import (
    AUTHORS,
    RUN,
    SHORT,
    Fresh,
    a_run,
    group,
    iterate,
    new_store,
    policy,
    put,
    session_row,
    sql,
    task,
    tokens,
    trajectory,
)


def filled(store: ReplayStore) -> ReplayStore:
    """Rows of every shape: several segments, no messages, unknown log-probs, odd texts, drawn and not."""
    for iteration in (1, 2):
        iterate(store, iteration)
    long = tokens(list(range(300)), ["template"] * 100 + ["llm"] * 120 + ["llm(discard)"] * 80, version=1)
    unknown = replace(SHORT, behavior_log_probs=np.full(len(SHORT), np.nan, np.float32))
    rows = [
        trajectory("two", segments=(Segment(SHORT), Segment(long, "strategy_rewrite"))),
        trajectory("hinted", segments=(Segment(unknown, "clean", "hinted"),), mean_entropy=None),
        trajectory("untrained", segments=(Segment(tokens([1], ["user"])),), parent="two", error_kinds="timeout raised"),
        replace(trajectory("\ud800 ' \x00 \ue000json: \U0001f600"), messages=()),
    ]
    put(store, *rows)
    return store


def test_export_import_export_is_byte_equal(location: Location, tmp_path: Path) -> None:
    with closing(new_store(location)) as store:
        filled(store)
        store.append([], [], [session_row("agent", agent_rewards='{"scout":[0.5,-0.25]}')])
        rows = []
        for ending in ("jsonl", "jsonl.gz", "parquet"):
            first, second = tmp_path / f"first.{ending}", tmp_path / f"second.{ending}"
            assert export_file(store, first).rows == 21
            with closing(ReplayStore.create(tmp_path / f"{ending}.sqlite")) as other:
                report = import_file(other, first, name=None)
                assert (report.inserted, report.duplicates, report.bad) == (21, 0, 0)
                export_file(other, second)
                assert other.read(["agent"])[0].record.rewards_by_agent == {"scout": (0.5, -0.25)}
            assert first.read_bytes() == second.read_bytes()
            rows.append([jsonl.encode(row) for row in (parquet if ending == "parquet" else jsonl).read(first)])
        assert rows[0] == rows[1] == rows[2]
        places = [(row["iteration"], row["slot"], row["id"]) for row in map(json.loads, rows[0])]
        assert places == sorted(places)


def test_a_file_that_datasets_read_and_wrote_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    datasets = pytest.importorskip("datasets", reason="datasets is installed by make test")
    first, theirs, again = (tmp_path / f"{name}.parquet" for name in ("first", "theirs", "again"))
    with closing(filled(new_store(tmp_path / "run.sqlite"))) as store:
        put(store, session_row("agent"))
        export_file(store, first)
    found = datasets.load_dataset("parquet", data_files=str(first), split="train", cache_dir=str(tmp_path / "cache"))
    found.to_parquet(theirs)
    with closing(ReplayStore.create(tmp_path / "back.sqlite")) as store:
        assert import_file(store, theirs, name=None).inserted == 21
        export_file(store, again)
    assert again.read_bytes() == first.read_bytes()


ODD = "\ud800 ' \x00 \ue000json: \U0001f600 \n\u2028é"


def odd_row() -> Bundle:
    sequence = TokenSequence(
        np.array([0, 2**31 - 1, 7, 8], np.int32),
        np.array([AUTHORS.code(name) for name in (TEMPLATE, LLM, LLM, ENV)], np.uint8),
        np.array([np.nan, -3.4028235e38, -1e-45, np.nan], np.float32),
        np.array([-1, 3, 3, -1], np.int32),
    )
    v = {ODD: ODD, "f": 5e-324, "none": None, "whole": 2**70, "list": [1.5, {"": [True]}]}
    calls = (ToolCall(ODD, v, None), ToolCall("", {}, ODD))
    said = (Message(ODD, ODD, ODD, calls, ODD, ODD, ODD, ODD), Message(USER, "user", ""))
    segments = (Segment(sequence), Segment(sequence, "template_rewrite", "hinted"))
    row = trajectory(ODD, segments=segments, reward=-3.4028234663852886e38, mean_entropy=None, stop_reason=ODD)
    run = replace(a_run(), config={ODD: [v]}, name=ODD)
    return Bundle(
        replace(row, messages=said), group(), replace(task(), payload=v), run, (replace(policy(3), tokenizer_hash=ODD),)
    )


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_odd_row_comes_back_as_it_was(tmp_path: Path, ending: str) -> None:
    given, path = odd_row(), tmp_path / f"rows.{ending}"
    if ending == "parquet":
        parquet.write(path, [given])
        (found,) = (row for row in parquet.read(path) if isinstance(row, Bundle))
    else:
        line = jsonl.encode(given)
        assert b"\n" not in line
        found = jsonl.decode(line)
    assert jsonl.encode(found) == jsonl.encode(given)
    assert (found.group, found.task, found.run, found.policies) == (given.group, given.task, given.run, given.policies)
    assert found.trajectory.messages == given.trajectory.messages
    assert repr(found.trajectory.record) == repr(given.trajectory.record)  # where NaN is NaN
    for mine, theirs in zip(found.trajectory.segments, given.trajectory.segments, strict=True):
        assert (mine.reason, mine.behavior_context) == (theirs.reason, theirs.behavior_context)
        assert mine.tokens.equals(theirs.tokens)


def test_log_probs_are_the_shortest_decimals_that_read_back_bit_by_bit() -> None:
    assert json.dumps(jsonl._numbers(np.array([math.nan, -0.1, -1e-45], np.float32))) == "[null, -0.1, -1e-45]"
    bits = np.random.default_rng(0).integers(0x80000000, 0xFF7FFFFF, 20_000, dtype=np.uint32)
    values = bits.view(np.float32)
    assert (np.array(jsonl._numbers(values), np.float64).astype(np.float32).view(np.uint32) == bits).all()


def test_a_file_imported_twice_is_stored_once(file_store: ReplayStore, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    export_file(filled(file_store), path)
    with closing(ReplayStore.create(tmp_path / "b.sqlite")) as other:
        assert import_file(other, path, name="first").inserted == 20
        assert sql(other, "select distinct source, run from trajectories") == [("first", RUN)]
        report = import_file(other, path, name="second")
        assert (report.inserted, report.duplicates) == (0, 20)
        assert sql(other, "select source, count(*) from trajectories group by 1") == [("first", 20)]
    report = import_file(file_store, path, name="home")
    assert (report.inserted, report.duplicates) == (0, 20)
    assert sql(file_store, "select distinct source from trajectories") == [("self",)]


def test_a_snapshot_elsewhere_is_no_policy_of_this_folder(file_store: ReplayStore, tmp_path: Path) -> None:
    file_store.add_policy(replace(policy(0), checkpoint="policies/000000"))
    Fresh(1, rates=(0.5,)).append_to(file_store)
    export_file(file_store, tmp_path / "rows.jsonl")
    with closing(ReplayStore.create(tmp_path / "b.sqlite")) as other:
        import_file(other, tmp_path / "rows.jsonl")
        assert sql(other, "select version, checkpoint, tokenizer_hash from policies") == [(0, None, "tok")]
    import_file(file_store, tmp_path / "rows.jsonl")
    assert sql(file_store, "select checkpoint from policies") == [("policies/000000",)]


def test_rows_are_chosen_and_those_left_out_counted(file_store: ReplayStore, tmp_path: Path) -> None:
    filled(file_store)
    file_store.resume(RUN, 1)  # iteration 2 and its 8 rows are newer than the checkpoint
    report = export_file(file_store, tmp_path / "all.jsonl")
    assert (report.rows, dict(report.left)) == (12, {"orphaned": 8})
    report = export_file(file_store, tmp_path / "some.jsonl", where=condition("success and iteration == 1"))
    assert (report.rows, dict(report.left)) == (7, {})
    rows = [json.loads(line) for line in (tmp_path / "some.jsonl").read_text().splitlines()]
    assert [row["success"] for row in rows] == [True] * 7
    assert export_file(file_store, tmp_path / "none.jsonl", where=condition("run == 'another'")).rows == 0


def test_row_evicted_meanwhile_is_left_out_and_counted(location: Location, tmp_path: Path) -> None:
    with closing(new_store(location)) as store:
        put(store, *[trajectory(f"t{slot:03d}", slot=slot) for slot in range(130)])

        def evict(done: int, total: int) -> None:
            assert total == 130
            if done == 10:  # of the first transaction's 64 rows
                store.prune(rows=condition("id in ('t005', 't063', 't064', 't129')"), dry_run=False)
                store.append([], [], [trajectory("t1295", slot=200)])

        report = export_file(store, tmp_path / "rows.jsonl", progress=evict)
    assert (report.rows, dict(report.left)) == (128, {"evicted": 2})
    rows = [json.loads(line)["id"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows == [f"t{slot:03d}" for slot in range(130) if slot not in (64, 129)]
