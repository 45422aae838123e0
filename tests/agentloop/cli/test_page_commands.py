"""`agentloop report | inspect`: the page of a run as one file, and all pages in a browser."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from agentloop.config import RunConfig
from agentloop.config.config_file import to_plain
from context.authors import default_authors
from replay.exchange import export_file
from replay.questions.filters import condition
from replay.records import RunRecord
from replay.store import ReplayStore
from tests.fakes.processes import AGENTLOOP
from tests.fakes.records import iterated
from tests.fakes.shell import Shell
from tests.replay.pages.serving import Served


def add_run(store: ReplayStore, id: str, name: str, success: float) -> None:
    authors = default_authors()
    store.add_run(RunRecord(id, name, to_plain(RunConfig()), authors.to_json(), authors.hash, "0.1.0"))
    store.add_metrics(id, 0, {"eval/success": success})


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run whose database is open to its trainer."""
    folder = tmp_path / "runs" / "live-001"
    folder.mkdir(parents=True)
    with closing(ReplayStore.create(folder / "replay.sqlite")) as store:
        add_run(store, "run-a", "live-001", 0.25)
        yield folder


def test_report_of_several_runs_names_them_or_can_not_be_written(running: Path, tmp_path: Path, shell: Shell) -> None:
    with closing(ReplayStore.open(running / "replay.sqlite", read_only=False)) as store:
        add_run(store, "run-b", "other-001", 0.75)
    database, out = running / "replay.sqlite", tmp_path / "sent.html"
    refused = shell.refusal(["report", database], tmp_path)
    assert refused.startswith("RUN must be one run of")
    assert "got live-001 (run-a), other-001 (run-b). Give its folder, or its id with --run." in refused
    nobody = shell.refusal(["report", database, "--run", "nobody"], tmp_path)
    assert "got 'nobody' where there are live-001" in nobody
    asked = ["report", database, "--run", "other-001", "--out"]
    assert shell.type([*asked, out], tmp_path) == (0, f"{out}\n", "")
    assert "75.0 %" in out.read_text(encoding="utf-8")
    for place, problem in ((tmp_path / "no" / "where.html", "No such file or directory"), (tmp_path, "Is a directory")):
        refused = shell.refusal([*asked, place], tmp_path)
        assert refused.startswith(f"--out must be writable, got {problem} at")
    assert not list(tmp_path.parent.glob("*.tmp"))


@pytest.mark.slow
def test_inspect_prints_an_address_whose_token_becomes_a_cookie_and_ends_without_a_word(running: Path) -> None:
    command = [AGENTLOOP, "inspect", running, "--no-browser", "--port", "0", "--token", "auto"]
    inspector = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert inspector.stdout
        address = urlsplit(inspector.stdout.readline().split()[-1])
        server = Served(int(address.port or 0))
        brought = server.ask(f"/buffer?{address.query}")
        assert (address.query[:6], brought.status, brought.header("location")) == ("token=", 303, "/buffer")
        cookie = str(brought.header("set-cookie")).partition(";")[0]
        assert server.ask("/buffer").status == 401
        assert server.ask("/buffer", headers=[("Cookie", cookie)]).status == 200
    finally:
        inspector.send_signal(signal.SIGINT)
        _, errors = inspector.communicate(timeout=20)
    assert errors == ""


@pytest.mark.slow
def test_inspect_shows_a_file_of_rows_in_a_database_that_goes_with_it(tmp_path: Path) -> None:
    with closing(iterated(tmp_path / "replay.sqlite")) as store:
        export_file(store, tmp_path / "rows.parquet", where=condition("success"))
    command = [AGENTLOOP, "inspect", tmp_path / "rows.parquet", "--no-browser", "--port", "0"]
    temporary = {**os.environ, "TMPDIR": str(tmp_path)}
    inspector = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=temporary)
    try:
        assert inspector.stdout
        early, first, second = (inspector.stdout.readline() for _ in range(3))
        assert early == f"{tmp_path}/rows.parquet: its rows go into a temporary database first\n"
        assert first.startswith(f"{tmp_path}/rows.parquet: 9 rows in a temporary database, in which labels last")
        page = Served(int(urlsplit(second.split()[-1]).port or 0)).page("/buffer")
        assert page.count("<tr data-href") == 9 and f'title="What is shown.">{tmp_path}/rows.parquet<' in page
    finally:
        inspector.send_signal(signal.SIGINT)
        _, errors = inspector.communicate(timeout=20)
    assert (errors, [path.name for path in tmp_path.glob("tmp*")]) == ("", [])
