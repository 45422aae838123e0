import gzip
import json
import os
import random
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replay import ReplayStore
from replay.exchange import ExchangeError, export_file, import_file, jsonl, parquet
from replay.exchange.row_format import Bundle
from replay.exchange.teacher import import_chat
from replay.storage.format.encoding import content_hash
from tests.fakes.altered_rows import altered
from tests.fakes.records import a_run, group, new_store, planned_row, put, sql, task, trajectory
from tests.replay.exchange.test_teacher import ANSWER, ASKED, CALLED, TOOLS, teaching


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of three rows, and the rows as a file."""
    folder = tmp_path_factory.mktemp("made")
    with closing(new_store(folder / "replay.sqlite")) as store:
        put(store, trajectory("a"), trajectory("b", slot=1), trajectory("c", slot=2))
        export_file(store, folder / "good.jsonl")
    return folder


@pytest.fixture
def three_rows(made: Path, tmp_path: Path) -> Iterator[ReplayStore]:
    shutil.copy(made / "replay.sqlite", tmp_path)
    with closing(ReplayStore.open(tmp_path / "replay.sqlite")) as store:
        yield store


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[ReplayStore]:
    with closing(ReplayStore.create(tmp_path / "other.sqlite")) as other:
        yield other


@pytest.fixture
def rows(made: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (made / "good.jsonl").read_text().splitlines()]


def lines_of(rows: list[Any]) -> bytes:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()


def test_a_name_in_a_row_is_never_a_path(empty: ReplayStore, rows: list[Any], tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    names = ["../touched", str(tmp_path / "touched"), "~/touched", "file:touched"]
    named = [{**rows[0], **dict.fromkeys(("id", "run", "group_id", "task", "run_name"), name)} for name in names]
    (folder / "rows.jsonl").write_bytes(lines_of(named))
    assert import_file(empty, folder / "rows.jsonl").inserted == export_file(empty, folder / "out.jsonl").rows == 4
    assert sorted(path.name for path in tmp_path.iterdir() if "sqlite" not in path.name) == ["files"]
    assert sorted(path.name for path in folder.iterdir()) == ["out.jsonl", "rows.jsonl"]


def test_export_takes_the_name_at_once_and_only_if_free_or_given_up(three_rows: ReplayStore, tmp_path: Path) -> None:
    target, link = tmp_path / "rows.jsonl", tmp_path / "link.jsonl"
    target.write_text("mine")
    link.symlink_to(target)
    with pytest.raises(ExchangeError, match="^FILE must not exist, got .* or overwrite with --force"):
        export_file(three_rows, target)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_file(three_rows, target, force=True, progress=stop)
    export_file(three_rows, link, force=True)  # takes the link's place, not that of what it leads to
    assert target.read_text() == "mine" and not link.is_symlink()
    assert [path.name for path in tmp_path.iterdir() if "unfinished" in path.name] == []
    export_file(three_rows, target, force=True)
    assert (target.read_bytes().count(b"\n"), os.stat(target).st_mode & 0o777) == (3, 0o600)
    (tmp_path / "folder.jsonl").mkdir()
    for place in ("nowhere/rows.jsonl", "folder.jsonl/", "x\x00.jsonl", "."):
        with pytest.raises(ExchangeError, match=r"^FILE must[^\n]*$"):
            export_file(three_rows, tmp_path / place, force=True)


REFUSED = [
    *((name, "import", "^FILE must end in .jsonl, .jsonl.gz or .parquet") for name in ("rows", "x.jsonl.zst", "x.pkl")),
    *(("x.jsonl", name, "^--name must match") for name in ("../x", "", "a b", "x" * 65, "ü", "self", "a\n", ".")),
]


@pytest.mark.parametrize(("file", "name", "said"), REFUSED)
def test_other_files_and_names_are_refused(empty: ReplayStore, tmp_path: Path, file: str, name: str, said: str) -> None:
    (tmp_path / file).write_text("{}\n")
    with pytest.raises(ExchangeError, match=said):
        import_file(empty, tmp_path / file, name=name)
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ExchangeError, match="which is not one"):
        import_file(empty, tmp_path / "pipe.jsonl")


def test_a_line_or_a_row_may_be_long_but_not_endless(
    empty: ReplayStore, three_rows: ReplayStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bomb.jsonl.gz").write_bytes(gzip.compress(b" " * (1 << 27), 1))
    tracemalloc.start()
    with pytest.raises(ExchangeError, match=r"bomb.jsonl.gz:1: line must be at most .* bytes"):
        import_file(empty, tmp_path / "bomb.jsonl.gz")
    assert tracemalloc.get_traced_memory()[1] < 1 << 27
    tracemalloc.stop()
    monkeypatch.setattr(jsonl, "MOST_LINE", 100)  # what can't be imported is not exported
    with pytest.raises(ExchangeError, match="row must be at most 100 bytes as JSON, got .* for trajectory a"):
        export_file(three_rows, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_row_group_of_parquet_is_limited(
    three_rows: ReplayStore, empty: ReplayStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of equal numbers takes six bytes of the file."""
    path = tmp_path / "bomb.parquet"
    export_file(three_rows, path)
    table = pq.read_table(path)
    (segment,) = table["segments"][0].as_py()
    at = table.column_names.index("segments")
    long = pa.array([[segment | {"token_ids": [1] * 600_000}]] * 3, table.field(at).type)
    pq.write_table(table.set_column(at, "segments", long), path)
    assert path.stat().st_size < 200_000
    monkeypatch.setattr(parquet, "MOST_GROUP", 4 << 20)
    tracemalloc.start()
    with pytest.raises(ExchangeError, match="bomb.parquet:row 1: row groups must be at most 4,194,304 bytes in memory"):
        import_file(empty, path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()


def spelled(reward: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: json.dumps(row).replace('"reward": 1.0', f'"reward": {reward}')


def of_tokens(**arrays: list[Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda row: {**row, "segments": [{**row["segments"][0], **arrays}]}


def of_nodes(at: int, **columns: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A session's row in which a node has other columns."""
    given = planned_row("b", slot=1)
    given = replace(given, record=replace(given.record, content_hash=content_hash(given.segments)))
    row = json.loads(jsonl.encode(Bundle(given, group(), task(), a_run(), ())))
    row["nodes"][at] |= columns
    return lambda _: row


SMALL = {"run": "small", "group_id": "g", "run_fingerprint": '{"vocab_size":10}'}
Change = str | dict[str, Any] | Callable[[dict[str, Any]], Any]
BAD: list[tuple[Change, str]] = [
    ("{", "line must be JSON"),
    ("[" * 5000 + "]" * 5000, "line must be JSON .nested too deep"),
    (lambda row: json.dumps(row)[:-1] + ', "reward": 5}', "line must be JSON \\('reward' stands twice in one object"),
    (spelled("NaN"), "line must be JSON .*NaN is no number of JSON"),
    (spelled("1e400"), "reward must be a finite number"),
    ({"advantage": 1e300}, r"advantage must be a number that float32 can hold, got 1e\+300"),
    (SMALL, r"segments\[0\].token_ids\[5\] must be below 10, the size of its run's vocabulary, got 10"),
    (lambda row: of_nodes(0)(row) | SMALL, r"nodes\[0\].token_ids\[1\] must be below 10, the size of its run's"),
    ({"rewards": 1}, "known columns, got 'rewards'. Did you mean 'reward'"),
    (lambda row: {name: row[name] for name in row if name != "run"}, "row must hold 'run', got none"),
    ({"created_at": "2026-01-01T00:00:00"}, "created_at must .*have a time zone"),
    ({"created_at": "0001-01-01T00:00:00+23:00"}, "created_at must .*be of the years"),
    ({"format": 6}, "format must be 8, got 6"),  # of before num_user_turns
    ({"group_id": "g", "group_success": 2}, "group_success must be less than"),
    ({"task_payload": "x"}, "task_payload must be JSON"),
    ({"task_payload": '{"a":' * 300 + "1" + "}" * 300}, "task_payload.a.* must be nested less deep"),
    ({"run_authors": "[]"}, "run_authors_hash must be that of run_authors"),
    (of_tokens(token_ids=[5, 6, 7, 8, 9, 11]), "content_hash must be that of the tokens"),
    (of_tokens(token_ids=[None, 6, 7, 8, 9, 10]), "token_ids must be a list of int32"),
    (of_tokens(token_ids=[2**31, 6, 7, 8, 9, 10]), "must hold numbers of int32, none beyond"),
    (of_tokens(token_ids=[5]), r"segments\[0\].authors must have one entry per token \(1\), got 6"),
    (of_nodes(1, parent=1), r"nodes\[1\].parent must fit the nodes before it"),
    (of_nodes(1, kept_tokens=34), r"nodes\[1\].kept_tokens must fit the nodes before it"),
    (of_nodes(4, kept_tokens=13), "content_hash must be that of the tokens"),
    (of_nodes(4, kept_messages=-1), r"nodes\[4\].kept_messages must fit the nodes before it"),
    (of_nodes(2, number=3), r"nodes\[2\].number must fit the nodes before it"),
    (of_nodes(2, num_sampled=99), r"nodes\[2\].num_sampled must fit the nodes before it"),
    (of_nodes(6, status="trained"), "content_hash must be that of the tokens"),
    (of_nodes(6, status="given"), r"nodes\[6\].status must be 'trained', 'undelivered', 'aside' or 'refused'"),
    (of_nodes(0, fork="of"), r"nodes\[0\].fork must be 'new', "),
    (of_nodes(0, offered="{}"), r"nodes\[0\].offered must be JSON of a list"),
    (of_nodes(0, num_messages=-1), r"nodes\[0\].num_sampled must fit"),
    (lambda row: {**row, "messages": row["messages"][1:]}, "messages_hash must be .* To import them as they are,"),
]


def answered(**more: Any) -> dict[str, Any]:
    return {"messages": [*ASKED, {**ANSWER, **more}]}


BAD_CONVERSATIONS: list[tuple[Change, str]] = [
    ("{", "line must be JSON"),
    (lambda row: {"prompt": "x"}, "row must hold 'messages', got none"),
    ({"messages": ASKED}, "messages must end in a reply of the assistant"),
    (answered(weight=0), "hold a trained one, got none"),
    ({"messages": [ASKED[0], ANSWER]}, "messages must hold a user message"),
    ({"messages": [{"role": "<|im_end|>", "content": "x"}, *ASKED, ANSWER]}, "role must match"),
    ({"messages": [{"role": 5}, ANSWER]}, r"messages\[0\] must be an object with a role"),
    (answered(function_call={"name": "f"}), "function_call must be empty"),
    ({"reward": "1"}, "reward must be a valid number, got '1'"),
    ({"tools": [{"function": 5}]}, r"tools\[0\] must be"),
    ({"messages": [*ASKED, CALLED[0], ANSWER]}, "messages must hold no two replies of the assistant in a row"),
]
FORMS = [("rows", *bad) for bad in BAD] + [("conversations", *bad) for bad in BAD_CONVERSATIONS]


@pytest.mark.parametrize(("form", "change", "message"), FORMS, ids=range(len(FORMS)))
def test_bad_row_or_conversation_is_named_and_nothing_is_stored(
    empty: ReplayStore, file_store: ReplayStore, rows: list[Any], tmp_path: Path, form: str, change: Any, message: str
) -> None:
    whole = rows if form == "rows" else [{"messages": [*ASKED, ANSWER], "reward": number} for number in range(3)]
    bad = change(whole[1]) if callable(change) else {**whole[1], **change} if isinstance(change, dict) else change
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines_of([whole[0], bad, whole[2]]))
    made = partial(import_chat, file_store, path, teaching(file_store, tmp_path))
    store, read = (empty, partial(import_file, empty, path)) if form == "rows" else (file_store, made)
    with pytest.raises(ExchangeError, match=f"rows.jsonl:2: .*{message}") as refused:
        read()
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500
    assert "Nothing was stored" in str(refused.value) and "--" not in str(refused.value)
    assert sql(store, "select count(*) from trajectories") == sql(store, "select count(*) from tasks") == [(0,)]
    assert len(sql(store, "select id from runs")) == (form == "conversations")  # the run that is to learn
    report = read(skip_bad=True)
    assert (report.inserted, report.bad) == (2, 1)
    assert report.problems[0].startswith(f"{path}:2: ")
    assert sql(store, "select slot from trajectories order by slot") == [(0,), (2,)]


def test_contradictions_are_bad(three_rows: ReplayStore, empty: ReplayStore, rows: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for changed, message in (
        ({"reward": 0.5}, "trajectory must be the same in every row, got 'a' with two contents"),
        ({"id": "d", "group_size": 7}, "group must be the same in every row, got 'group-1'"),
        ({"id": "d", "task_payload": "{}"}, "task must be the same in every row, got 'task-1'"),
        ({"id": "d", "run_config": "{}"}, "run_config must be that of the known run 'run-1'"),
    ):
        path.write_bytes(lines_of([*rows, {**rows[0], **changed}]))
        with pytest.raises(ExchangeError, match=f"rows.jsonl:4: {message}"):
            import_file(empty, path)
    path.write_bytes(lines_of([rows[0], {**rows[1], "reward": 0.5}]))
    with pytest.raises(ExchangeError, match=r"rows.jsonl:2: reward must be the stored 1.0 of the same id, got 0.5"):
        import_file(three_rows, path)
    other = json.loads(json.dumps(rows[2]).replace("tpl", "another"))
    path.write_bytes(lines_of([{**other, "id": "d"}]))
    with pytest.raises(ExchangeError, match="policies must be those of the known run 'run-1', got another tokenizer"):
        import_file(three_rows, path)


@pytest.mark.parametrize("form", ["rows", "conversations"])
def test_an_altered_row_or_conversation_is_imported_or_named(
    empty: ReplayStore, three_rows: ReplayStore, rows: list[Any], tmp_path: Path, form: str
) -> None:
    chance, path = random.Random(1), tmp_path / "rows.jsonl"
    whole, store = {**rows[0], "messages_hash": ""}, empty
    if form == "conversations":
        whole, store = (
            {"messages": [*ASKED, *CALLED, ANSWER], "tools": TOOLS, "reward": 1.0, "success": True},
            three_rows,
        )
        made = teaching(store, tmp_path)
    imported = named = 0
    for _ in range(25):
        path.write_bytes(lines_of([altered(whole, chance) for _ in range(20)]))
        if form == "rows":
            report = import_file(store, path, skip_bad=True)
        else:
            report = import_chat(store, path, made, skip_bad=True)
        assert (report.rows + report.bad, len(report.problems)) == (20, report.bad)
        assert all(line.startswith(f"{path}:") and "\n" not in line for line in report.problems)
        imported, named = imported + report.rows, named + report.bad
    assert imported > (20 if form == "rows" else 50) and named > 50


@pytest.mark.parametrize("ending", ["jsonl.gz", "parquet"])
def test_damaged_files_store_nothing(three_rows: ReplayStore, empty: ReplayStore, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"rows.{ending}"
    export_file(three_rows, path)
    whole = path.read_bytes()
    for cut in (1, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(ExchangeError):
            import_file(empty, path)
    for at in range(5, len(whole), max(1, len(whole) // (6 if ending == "parquet" else 25))):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with suppress(ExchangeError):
            import_file(empty, path)
    # A flip that nobody noticed changed nothing but unchecked text.
    assert sql(empty, "select count(*) from segments") in ([(0,)], [(3,)])


def test_parquet_of_other_columns_is_refused(three_rows: ReplayStore, empty: ReplayStore, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    export_file(three_rows, path)
    table = pq.read_table(path)
    for changed, message in (
        (table.drop_columns(["reward"]), "row must hold 'reward', got none"),
        (table.append_column("extra", pa.array([1, 2, 3])), "row must hold known columns, got 'extra'"),
        (table.set_column(1, "id", pa.array([1, 2, 3])), "id must be a valid string, got 1"),
        (table.set_column(1, "id", pa.array(["x", None, "y"])), "id must be a valid string, got None"),
        (table.set_column(1, "id", pa.array([10**18] * 3, pa.timestamp("us"))), "contents must be Parquet, got: "),
        (table.set_column(1, "id", pa.array(["\ue000json:[", "x", "y"])), "text must be escaped"),
    ):
        pq.write_table(changed, path)
        with pytest.raises(ExchangeError, match=f"rows.parquet:row [12]: {message}"):
            import_file(empty, path)
    pq.write_table(table.select(list(reversed(table.column_names))), path)
    assert import_file(empty, path).inserted == 3
