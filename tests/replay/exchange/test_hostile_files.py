"""Files from strangers: what is refused, by name, before anything is stored, run, or taken into memory."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from replay import ReplayStore
from replay.exchange import ExchangeError, export_file, files, import_file, jsonl, parquet
from replay.exchange.row_format import BadRow, json_line
from tests.fakes.altered_rows import altered
from tests.fakes.records import group, new_store, sql, task, trajectory


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of three rows, an empty one, and the rows as a file."""
    folder = tmp_path_factory.mktemp("made")
    ReplayStore.create(folder / "other.sqlite").close()
    with closing(new_store(folder / "replay.sqlite")) as store:
        store.append([task()], [group()], [trajectory("a"), trajectory("b", slot=1), trajectory("c", slot=2)])
        export_file(store, folder / "good.jsonl")
    return folder


@pytest.fixture
def three_rows(made: Path, tmp_path: Path) -> Iterator[ReplayStore]:
    shutil.copy(made / "replay.sqlite", tmp_path)
    with closing(ReplayStore.open(tmp_path / "replay.sqlite")) as store:
        yield store


@pytest.fixture
def empty(made: Path, tmp_path: Path) -> Iterator[ReplayStore]:
    shutil.copy(made / "other.sqlite", tmp_path)
    with closing(ReplayStore.open(tmp_path / "other.sqlite")) as other:
        yield other


@pytest.fixture
def rows(made: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (made / "good.jsonl").read_text().splitlines()]


def lines_of(rows: list[Any]) -> bytes:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()


def stored(store: ReplayStore) -> int:
    counts = [sql(store, f"select count(*) from {table}")[0][0] for table in ("runs", "tasks", "trajectories")]
    return sum(map(int, counts))


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "sqlite" not in path.name
    }


# F25: whatever a row calls its run, task or group, a name is never a path.
NAMES = [
    *("..", "../up", "../../etc/passwd", "/etc/passwd", "/tmp/x", "~/x", "a/../../b", "./../x", "..\\up", "C:\\x"),
    *("C:/x", "\\\\host\\share", "file:///etc/passwd", "%2e%2e/x", "..%2fx", "..;/x", "x\x00.jsonl", "\x00", "con"),
    *(
        "nul",
        "aux.txt",
        "a" * 5000,
        ".",
        "",
        " ",
        "-rf",
        "--force",
        "$(touch x)",
        "`touch x`",
        "; touch x",
        "| touch x",
    ),
    *(
        *("x\ny", "\r\n", "\u202etxt.exe", "\ud800", "*", "?", "a:b", "replay.sqlite", "../replay.sqlite", "model"),
        "run.json",
    ),
    *("policies/000000", "checkpoints/../..", "....//", "..\u2215x", "\uff0e\uff0e/x", "/proc/self/mem", "/dev/sda"),
    *("sqlite:///x", "postgresql://x", "http://169.254.169.254/"),
]


def test_names_are_never_paths(three_rows: ReplayStore, tmp_path: Path) -> None:
    assert len(NAMES) >= 50
    given = [name for name in NAMES if name]  # an id has at least one character
    three_rows.append([task(name) for name in given], [group(name, task=name) for name in given], [])
    three_rows.append([], [], [trajectory(n, group=n, task=n, slot=s, environment=n) for s, n in enumerate(given)])
    inside = tmp_path / "inside"
    inside.mkdir()
    before = tree(tmp_path)
    for ending in ("jsonl", "parquet"):
        export_file(three_rows, inside / f"rows.{ending}")
        with closing(ReplayStore.create(inside / f"{ending}.sqlite")) as other:
            assert import_file(other, inside / f"rows.{ending}").inserted == len(given) + 3
    written = {name: data for name, data in tree(tmp_path).items() if name not in before}
    assert sorted(written) == ["inside/rows.jsonl", "inside/rows.parquet"]


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "", "a b", "x" * 65, "ü", "self", "gateway", "a\n", "a\x00", ".", ".."]
)
def test_set_name_is_a_plain_word(empty: ReplayStore, tmp_path: Path, name: str) -> None:
    with pytest.raises(ExchangeError, match="^--name must match"):
        import_file(empty, tmp_path / "rows.jsonl", name=name)


def test_export_takes_the_name_at_once_and_only_if_it_is_free(three_rows: ReplayStore, tmp_path: Path) -> None:
    target = tmp_path / "rows.jsonl"
    target.write_text("mine")
    with pytest.raises(ExchangeError, match="^FILE must not exist, got .* or overwrite with --force"):
        export_file(three_rows, target)
    assert target.read_text() == "mine"
    export_file(three_rows, target, force=True)
    assert target.read_bytes().count(b"\n") == 3
    assert os.stat(target).st_mode & 0o777 == 0o600


def test_export_that_fails_leaves_what_was_there(three_rows: ReplayStore, tmp_path: Path) -> None:
    target = tmp_path / "rows.jsonl"
    target.write_text("mine")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_file(three_rows, target, force=True, progress=stop)
    assert target.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir() if "unfinished" in path.name] == []


def test_export_replaces_a_link_and_not_what_it_leads_to(three_rows: ReplayStore, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    link = tmp_path / "rows.jsonl"
    link.symlink_to(precious)
    with pytest.raises(ExchangeError, match="must not exist"):
        export_file(three_rows, link)
    export_file(three_rows, link, force=True)
    assert precious.read_text() == "mine"
    assert not link.is_symlink()


@pytest.mark.parametrize("place", ["nowhere/rows.jsonl", "rows.jsonl/", "x\x00.jsonl", "."])
def test_a_place_that_can_not_be_written_is_one_line(three_rows: ReplayStore, tmp_path: Path, place: str) -> None:
    (tmp_path / "rows.jsonl").mkdir()
    with pytest.raises(ExchangeError, match="^FILE must") as refused:
        export_file(three_rows, tmp_path / place, force=True)
    assert "\n" not in str(refused.value)


class Canary:
    """Says so if it is ever unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


# F26: formats that run code are refused by their name, and under a name of ours they are no rows.
@pytest.mark.parametrize(
    "name", ["x.pkl", "x.pickle", "x.pt", "x.PT", "x.pth", "x.joblib", "x.bin", "x.npy", "x.pkl.gz"]
)
def test_formats_that_run_code_are_refused_by_name(empty: ReplayStore, tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary"
    (tmp_path / name).write_bytes(pickle.dumps(Canary(canary)))
    with pytest.raises(ExchangeError, match="^FILE must be a format that can't run code, got .* reading it could run"):
        import_file(empty, tmp_path / name)
    assert not canary.exists()


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.jsonl.zst", "x.parquet"])
def test_pickles_under_another_name_are_no_rows(empty: ReplayStore, tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary"
    data = pickle.dumps(Canary(canary))
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("archive/data.pkl", data)
    for content in (data, zipped.getvalue(), gzip.compress(data), zstandard.compress(data)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ExchangeError, match=r"x\..*:(row )?1: (contents|line) must"):
            import_file(empty, tmp_path / name)
    assert not canary.exists()


def test_nothing_here_unpickles() -> None:
    for path in Path(files.__file__).parent.glob("*.py"):
        source = path.read_text()
        assert "pickle." not in source and "eval(" not in source and "exec(" not in source


@pytest.mark.parametrize("name", ["rows", "rows.json", "rows.csv", "rows.jsonl.bz2", "rows.txt"])
def test_other_endings_are_refused(empty: ReplayStore, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}\n")
    with pytest.raises(ExchangeError, match="^FILE must end in .jsonl, .jsonl.gz, .jsonl.zst or .parquet"):
        import_file(empty, tmp_path / name)


def test_pipes_and_devices_are_no_files(empty: ReplayStore, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    for name in ("pipe.jsonl", "zero.jsonl"):
        with pytest.raises(ExchangeError, match="which is none"):
            import_file(empty, tmp_path / name)


GIB = 1 << 30


def _zst(data: Iterator[bytes]) -> bytes:
    out = io.BytesIO()
    with zstandard.ZstdCompressor(level=3).stream_writer(out, closefd=False) as writer:
        for piece in data:
            writer.write(piece)
    return out.getvalue()


def _gz(data: Iterator[bytes]) -> bytes:
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=1) as writer:
        for piece in data:
            writer.write(piece)
    return out.getvalue()


def _pieces(unit: bytes, total: int = GIB) -> Iterator[bytes]:
    piece = unit * ((1 << 20) // len(unit))
    return (piece for _ in range(total // len(piece)))


def _parquet(column: pa.Array, name: str = "id") -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({name: column}), out, compression="zstd")
    return out.getvalue()


def _long_text(folder: Path) -> bytes:
    """A dictionary of one text of 64 MB, which is every row's id."""
    one = pa.DictionaryArray.from_arrays(pa.array(np.zeros(8, np.int32)), pa.array(["x" * (1 << 26)]))
    return _exported(folder, lambda table: table.set_column(1, "id", one), 8)


def _many_nulls(folder: Path) -> bytes:
    """One row of 4 million messages that are null: a few bytes in each of nine columns of texts."""
    count = 4_000_000

    def change(table: pa.Table) -> pa.Table:
        place = table.schema.get_field_index("messages")
        kind = table.schema.field(place).type.value_type
        nothing = pa.StructArray.from_arrays(
            [pa.nulls(count, field.type) for field in kind], fields=list(kind), mask=pa.array(np.ones(count, np.bool_))
        )
        rows = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), nothing)
        return table.set_column(place, "messages", rows)

    return _exported(folder, change, 1)


def _many_tokens(folder: Path) -> bytes:
    """One row of 2^23 tokens, all of them 0: run lengths of a few bytes for 109 MB."""
    zeros = pa.array(np.zeros(1 << 23, np.int32))

    def change(table: pa.Table) -> pa.Table:
        place = table.schema.get_field_index("segments")
        kind = table.schema.field(place).type.value_type
        parts = []
        for field in kind:
            inner = zeros.cast(field.type.value_type) if pa.types.is_list(field.type) else pa.array(["clean"])
            bounds = pa.array([0, len(zeros)], pa.int32())
            parts.append(pa.ListArray.from_arrays(bounds, inner) if pa.types.is_list(field.type) else inner)
        struct = pa.StructArray.from_arrays(parts, fields=list(kind))
        return table.set_column(place, "segments", pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), struct))

    return _exported(folder, change, 1)


def _exported(folder: Path, change: Callable[[pa.Table], pa.Table], rows: int) -> bytes:
    """The rows of an export, changed: every other column is as it should be."""
    table = pq.read_table(folder / "good.parquet")
    out = io.BytesIO()
    whole = change(pa.concat_tables([table] * rows))
    pq.write_table(whole, out, compression="zstd", row_group_size=1 << 20, store_schema=False, use_dictionary=["id"])
    return out.getvalue()


BOMBS: dict[str, Callable[[Path], bytes]] = {
    "zeros.jsonl.zst": lambda _: _zst(_pieces(b"\0")),
    "declared.jsonl.zst": lambda _: zstandard.ZstdCompressor(level=1).compress(bytes(1 << 27)),
    "window.jsonl.zst": lambda _: zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=27)
    ).compress(bytes(1 << 27)),
    "spaces.jsonl.gz": lambda _: _gz(_pieces(b" ", 1 << 27)),
    "empty_lines.jsonl.zst": lambda _: _zst(_pieces(b"\n", 64 << 20)),
    "objects.jsonl.zst": lambda _: _zst(_pieces(b"{},", 64 << 20)),
    "small_objects.jsonl.zst": lambda _: _zst(iter([b"[" + b"{}," * 1_300_000 + b"{}]\n"])),
    "numbers.jsonl.zst": lambda _: _zst(iter([b"[" + b"1e1," * 1_000_000 + b"1]\n"])),
    "texts.jsonl.zst": lambda _: _zst(iter([b'["' + b'","'.join(b"%06d" % i for i in range(450_000)) + b'"]\n'])),
    "column.parquet": lambda _: _parquet(pa.array(np.zeros(1 << 25, np.int64))),
    "text.parquet": _long_text,
    "tokens.parquet": _many_tokens,
    "nulls.parquet": _many_nulls,
}


SHORT = ["declared.jsonl.zst", "small_objects.jsonl.zst", "nulls.parquet"]


# F27: refused before 64 MB are taken, and 600 by the process that reads Parquet, measured by the processes themselves.
@pytest.mark.parametrize("names", [SHORT, pytest.param(sorted(BOMBS), marks=pytest.mark.soak)], ids=["some", "all"])
def test_bombs_are_refused_in_little_memory(three_rows: ReplayStore, tmp_path: Path, names: list[str]) -> None:
    export_file(three_rows, tmp_path / "good.parquet", limit=1)
    for name in names:
        (tmp_path / name).write_bytes(BOMBS[name](tmp_path))
        # Of 1 GiB of zeros, 33 kB are left.
        assert (tmp_path / name).stat().st_size < 2 << 20
    program = (
        "import resource, sys; import pyarrow, pyarrow.parquet; from pathlib import Path\n"
        "from replay import ReplayStore; from replay.exchange import import_file, ExchangeError\n"
        "folder, *names = sys.argv[1:]\n"
        "store = ReplayStore.create(Path(folder) / 'other.sqlite')\n"
        "most = lambda whose=resource.RUSAGE_SELF: resource.getrusage(whose).ru_maxrss\n"
        "before = most()\n"
        "for name in names:\n"
        "    try: import_file(store, Path(folder) / name)\n"
        "    except ExchangeError as error: print(most() - before, error)\n"
        "    else: print(most() - before, 'imported', name)\n"
        "print(most(resource.RUSAGE_CHILDREN))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *lines, of_readers = done.stdout.splitlines()
    assert int(of_readers) < 600 * 1024
    for name, line in zip(names, lines, strict=True):
        kilobytes, message = line.split(" ", 1)
        assert f"{name}:" in message and " must " in message and "Nothing was stored" in message, line
        assert int(kilobytes) < 64 * 1024, line


def test_a_line_may_be_long_but_not_endless(
    empty: ReplayStore, rows: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert files.MOST_LINE == 33_554_432
    monkeypatch.setattr(files, "MOST_LINE", 3 << 20)
    rows[0]["messages"][0]["content"] = "x" * (2 << 20)
    rows[0]["messages_hash"] = ""
    (tmp_path / "long.jsonl").write_bytes(lines_of(rows))
    assert import_file(empty, tmp_path / "long.jsonl").inserted == 3
    rows[1]["messages"][0]["content"] = "x" * files.MOST_LINE
    (tmp_path / "endless.jsonl").write_bytes(lines_of(rows))
    with pytest.raises(ExchangeError, match=r"endless.jsonl:2: line must be at most 3,145,728 bytes"):
        import_file(empty, tmp_path / "endless.jsonl")


def test_what_can_not_be_imported_is_not_exported(
    three_rows: ReplayStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "MOST_LINE", 100)
    with pytest.raises(ExchangeError, match="row must be at most 100 bytes as JSON, got .* for trajectory a"):
        export_file(three_rows, tmp_path / "rows.jsonl")
    assert not (tmp_path / "rows.jsonl").exists()


BAD: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("no json", lambda row: "{", "line must be JSON"),
    ("two values", lambda row: "{} {}", "line must be JSON"),
    ("a list", lambda row: "[]", r"row must be an object, got \[\]"),
    ("null", lambda row: "null", "row must be an object, got None"),
    ("empty line", lambda row: "", "line must be JSON"),
    ("depth", lambda row: "[" * 100_000, "line must be JSON"),
    ("closed depth", lambda row: "[" * 5000 + "]" * 5000, "line must be JSON .nested too deep"),
    (
        "duplicate key",
        lambda row: json.dumps(row)[:-1] + ', "reward": 5}',
        "line must be JSON \\('reward' stands twice in one object",
    ),
    (
        "NaN",
        lambda row: {**row, "reward": float("nan")},
        "line must be JSON .*NaN is no number of JSON",
    ),
    (
        "huge number",
        lambda row: json.dumps(row).replace('"reward": 1.0', '"reward": ' + "9" * 5000),
        "line must be JSON",
    ),
    (
        "1e400",
        lambda row: json.dumps(row).replace('"reward": 1.0', '"reward": 1e400'),
        "reward must be a finite number",
    ),
    ("unknown column", lambda row: {**row, "rewards": 1}, "known columns, got 'rewards'. Did you mean 'reward'"),
    ("missing column", lambda row: {k: v for k, v in row.items() if k != "run"}, "row must hold 'run', got none"),
    ("newer format", lambda row: {**row, "format": 3}, "format must be 2, got 3"),
    ("type of id", lambda row: {**row, "id": ["a"]}, "id must be a valid string"),
    ("empty id", lambda row: {**row, "id": ""}, "id must be a text of at least one character"),
    ("bool as int", lambda row: {**row, "slot": True}, "slot must be a valid integer, got True"),
    ("negative", lambda row: {**row, "slot": -1}, "slot must be greater than or equal to 0"),
    ("beyond 31 bits", lambda row: {**row, "slot": 2**31}, "slot must be less than 2147483648"),
    ("cold", lambda row: {**row, "temperature": -1}, "temperature must be greater than or equal to 0, got -1"),
    ("top-p", lambda row: {**row, "top_p": 1.5}, "top_p must be less than or equal to 1, got 1.5"),
    (
        "spread",
        lambda row: {**row, "group": "g", "group_reward_std": -1},
        "group_reward_std must be greater than",
    ),
    (
        "endless group",
        lambda row: {**row, "group": "g", "group_size": 2**62},
        "group_size must be less than 2147",
    ),
    ("null reward", lambda row: {**row, "reward": None}, "reward must be a valid number, got None"),
    ("state", lambda row: {**row, "state": "quarantined"}, "state must be 'eligible'"),
    ("payload text", lambda row: {**row, "task_payload": "x"}, "task_payload must be JSON"),
    ("payload list", lambda row: {**row, "task_payload": "[]"}, "task_payload must be an object"),
    (
        "payload depth",
        lambda row: {**row, "task_payload": '{"a":' * 300 + "1" + "}" * 300},
        "task_payload.a.* must be nested less deep",
    ),
    ("authors", lambda row: {**row, "run_authors": "[]"}, "run_authors_hash must be that of run_authors"),
    (
        "group",
        lambda row: {**row, "group": "g", "group_size": 0},
        "group_size must be greater than",
    ),
    (
        "success rate",
        lambda row: {**row, "group": "g", "group_success_rate": 2},
        "group_success_rate must be less than",
    ),
    ("tokens", lambda row: _with(row, token_ids=[5, 6, 7, 8, 9, 11]), "content_hash must be that of the tokens"),
    ("float token", lambda row: _with(row, token_ids=[5.5, 6, 7, 8, 9, 10]), "token_ids must be a list of int32"),
    ("bool token", lambda row: _with(row, token_ids=[True, 6, 7, 8, 9, 10]), "token_ids must be a list of int32"),
    ("null token", lambda row: _with(row, token_ids=[None, 6, 7, 8, 9, 10]), "token_ids must be a list of int32"),
    (
        "big token",
        lambda row: _with(row, token_ids=[2**31, 6, 7, 8, 9, 10]),
        "must hold numbers of int32, none beyond",
    ),
    ("negative token", lambda row: _with(row, token_ids=[-1, 6, 7, 8, 9, 10]), "token_ids.0. must be >= 0"),
    (
        "short",
        lambda row: _with(row, token_ids=[5]),
        r"segments\[0\].authors must have one entry per token \(1\), got 6",
    ),
    ("unknown author", lambda row: _with(row, authors=[99] * 6), "must be a code of the run's author table"),
    ("missing log-prob", lambda row: _with(row, behavior_log_probs=[None] * 6), "must be finite and at most 0"),
    ("positive log-prob", lambda row: _with(row, behavior_log_probs=[None, None, 1, -1, None, -1]), "at most 0"),
    ("no segments", lambda row: {**row, "segments": []}, "segments must hold at least one token"),
    (
        "edited message",
        lambda row: {**row, "messages": [{**row["messages"][0], "content": "edited"}, *row["messages"][1:]]},
        "messages_hash must be that of the messages .* empty it to import them as they are",
    ),
    ("a message left out", lambda row: {**row, "messages": row["messages"][1:]}, "messages_hash must be"),
    ("a message", lambda row: {**row, "messages": [1]}, r"messages\[0\] must be an object, got 1"),
]


def test_messages_edited_on_purpose_are_imported(empty: ReplayStore, rows: list[Any], tmp_path: Path) -> None:
    rows[0]["messages"][0]["content"] = "edited"
    (tmp_path / "rows.jsonl").write_bytes(lines_of([{**rows[0], "messages_hash": ""}]))
    assert import_file(empty, tmp_path / "rows.jsonl").inserted == 1
    assert empty.read(["a"])[0].messages[0].content == "edited"


def _spelled(row: dict[str, Any], reward: str) -> str:
    return json.dumps(row).replace('"reward": 1.0', f'"reward": {reward}')


def _with(row: dict[str, Any], **tokens: list[Any]) -> dict[str, Any]:
    return {**row, "segments": [{**row["segments"][0], **tokens}]}


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_row_is_named_and_nothing_is_stored(
    empty: ReplayStore, rows: list[Any], tmp_path: Path, change: Callable[[Any], Any], message: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines_of([rows[0], change(rows[1]), rows[2]]))
    with pytest.raises(ExchangeError, match=f"rows.jsonl:2: .*{message}") as refused:
        import_file(empty, path)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500
    assert "Nothing was stored" in str(refused.value)
    assert stored(empty) == 0
    report = import_file(empty, path, skip_bad=True)
    assert (report.inserted, report.bad) == (2, 1)
    assert report.problems[0].startswith(f"{path}:2: ")
    assert sql(empty, "select id from trajectories order by id") == [("a",), ("c",)]


def test_rows_that_contradict_each_other_or_the_store_are_bad(
    three_rows: ReplayStore, empty: ReplayStore, rows: list[Any], tmp_path: Path
) -> None:
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


def test_an_altered_row_is_imported_or_named(empty: ReplayStore, rows: list[Any], tmp_path: Path) -> None:
    chance, path = random.Random(0), tmp_path / "rows.jsonl"
    imported = named = 0
    for _ in range(25):
        some = [altered({**rows[0], "messages_hash": ""}, chance) for _ in range(20)]
        path.write_bytes(lines_of(some))
        report = import_file(empty, path, skip_bad=True)
        assert (report.rows + report.bad, len(report.problems)) == (20, report.bad)
        assert all(line.startswith(f"{path}:") and "\n" not in line for line in report.problems)
        imported, named = imported + report.rows, named + report.bad
    assert imported > 20 and named > 50


def test_a_row_twice_is_one_row(empty: ReplayStore, rows: list[Any], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(lines_of([*rows, *rows]))
    report = import_file(empty, tmp_path / "rows.jsonl")
    assert (report.rows, report.inserted, report.duplicates) == (6, 3, 3)


def test_a_file_of_something_else_is_not_read_to_its_end(empty: ReplayStore, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n" * 1_000_000)
    with pytest.raises(ExchangeError, match="rows.jsonl:1: row must hold 'format', got none. Most rows are bad"):
        import_file(empty, tmp_path / "rows.jsonl", skip_bad=True)


@pytest.mark.parametrize("ending", ["jsonl.gz", "jsonl.zst", "parquet"])
def test_damaged_files_store_nothing(three_rows: ReplayStore, empty: ReplayStore, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"rows.{ending}"
    export_file(three_rows, path)
    whole = path.read_bytes()
    for cut in (0, 1, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        if cut == 0 and ending != "parquet":
            assert import_file(empty, path).rows == 0  # nothing is no damage
            continue
        with pytest.raises(ExchangeError):
            import_file(empty, path)
    for at in range(5, len(whole), max(1, len(whole) // (6 if ending == "parquet" else 25))):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        try:
            import_file(empty, path)
        except ExchangeError:
            continue
    # A flip that nobody noticed changed nothing but unchecked text.
    assert sql(empty, "select count(*) from segments") in ([(0,)], [(3,)])


@pytest.mark.parametrize("count", [4, pytest.param(400, marks=pytest.mark.soak)])
def test_altered_parquet_is_the_rows_or_one_line(
    three_rows: ReplayStore, tmp_path: Path, count: int, rows: list[Any]
) -> None:
    path = tmp_path / "rows.parquet"
    export_file(three_rows, path)
    whole, random = path.read_bytes(), np.random.default_rng(16)
    for _ in range(count):
        altered = bytearray(whole)
        for at in random.integers(0, len(whole), size=random.integers(1, 4)):
            altered[at] = random.integers(256)
        path.write_bytes(altered)
        try:
            found = [row if isinstance(row, BadRow) else json.loads(jsonl.encode(row)) for row in parquet.read(path)]
        except BadRow as error:
            found = [error]
        for row in found:
            assert row in rows if not isinstance(row, BadRow) else "\n" not in str(row) and " must " in str(row)


def test_parquet_of_other_columns_is_refused(three_rows: ReplayStore, empty: ReplayStore, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    export_file(three_rows, path)
    table = pq.read_table(path)
    for changed, message in (
        (table.drop_columns(["reward"]), "columns must hold 'reward', got none"),
        (table.append_column("extra", pa.array([1, 2, 3])), "columns must be those of an export, got 'extra'"),
        (table.set_column(1, "id", pa.array([1, 2, 3])), "id must be of type string, got 'int64'"),
        (table.set_column(1, "id", pa.array(["x", None, "y"])), "id must be a valid string, got None"),
        (table.set_column(1, "id", pa.array(["\ue000json:[", "x", "y"])), "text must be escaped"),
    ):
        pq.write_table(changed, path)
        with pytest.raises(ExchangeError, match=f"rows.parquet:row [12]: {message}"):
            import_file(empty, path)
    pq.write_table(table.select(list(reversed(table.column_names))), path)
    assert import_file(empty, path).inserted == 3


def test_odd_texts_survive_both_formats(empty: ReplayStore, three_rows: ReplayStore, tmp_path: Path) -> None:
    odd = "NUL \x00, half \ud83d, \u2028, \x1b[31m, \ue000json:1, '; drop table runs; --"
    said = replace(trajectory("a").messages[1], content=odd, note=odd)
    three_rows.append([], [], [replace(trajectory("d", slot=3), messages=(said,))])
    for ending in ("jsonl", "parquet"):
        export_file(three_rows, tmp_path / f"rows.{ending}")
        import_file(empty, tmp_path / f"rows.{ending}")
        assert empty.read(["d"])[0].messages == (said,)


def test_json_within_reason() -> None:
    assert json_line(b'{"a": [1, 2.5, "\\ud800", null]}') == {"a": [1, 2.5, "\ud800", None]}
    assert json_line(b'{"a": NaN}', constants=True)["a"] != 1
    for text in (b"\xff{}", '{"a": 1}'.encode("utf-16"), b'{"a": NaN}', b"[" * 100_000):
        with pytest.raises(BadRow, match="^line must be JSON"):
            json_line(text)


def test_parts_of_a_line_count_as_what_they_take_in_memory() -> None:
    assert files.size_of(b'{"a":[1]}') == 9 + 48 * 4
    assert files.size_of(b'"{\\"x"') == 6 + 48 * 3  # an escaped quote begins no text
