"""Folders and repositories of the hub, with its own client against a server that answers as the hub does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from replay import ReplayStore
from replay.exchange import export_file, export_folder, import_file
from tests.fakes.hub_server import TOKEN, HubServer, served
from tests.fakes.records import new_store, put, run_record, session_row, trajectory
from tests.fakes.replay_command import ask
from tests.replay.exchange.test_exchange import filled


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """20 rows of every shape, and an agent's session."""
    (tmp_path / "run").mkdir()
    with closing(filled(new_store(tmp_path / "run" / "replay.sqlite"))) as store:
        put(store, session_row("agent"))
        export_file(store, tmp_path / "rows.parquet")
    return tmp_path / "run"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The hub of commands in this process; jane has a public repository, and one with rows."""
    settings = {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True, "HF_HUB_CACHE": str(tmp_path / "cache")}
    for name, value in settings.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with served(HubServer()) as server:
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        server.add("jane/public", {}, private=False)
        server.add("jane/full", {"data/old.parquet": b"rows", "notes.txt": b"mine"})
        yield server


def test_rows_on_the_hub_come_back_bit_by_bit(run: Path, hub: HubServer, tmp_path: Path) -> None:
    output = ask("export", run, "--to", "hf:wins").output
    assert output.startswith("21 rows in hf:wins (") and output.endswith("MB)\nlicense: unknown\n")
    assert hub.private["jane/wins"]
    assert hub.files("jane/wins")["data/trajectories.parquet"] == (tmp_path / "rows.parquet").read_bytes()
    (_, (first, _)) = hub.commits["jane/wins"]
    assert ask("export", run, "--to", "hf:jane/wins", "--force", "--where", "not success").exit_code == 0
    assert len(hub.commits["jane/wins"]) == 3
    with closing(new_store(tmp_path / "back.sqlite", "run-2")) as store:
        for name, count in ((f"hf:jane/wins@{first}", 21), ("hf:jane/wins", 0)):
            output = ask("import", name, tmp_path / "back.sqlite", "--keep-source").output
            assert output.startswith(f"{count} rows imported from {name}, ")
        export_file(store, tmp_path / "again.parquet")
    assert (tmp_path / "again.parquet").read_bytes() == (tmp_path / "rows.parquet").read_bytes()


def test_rows_replace_all_others_of_a_repository_with_force_alone(run: Path, hub: HubServer) -> None:
    assert ask("export", run, "--to", "hf:jane/full", "--force").exit_code == 0
    assert set(hub.files("jane/full")) == {"README.md", "data/trajectories.parquet", "notes.txt"}
    assert ask("export", run, "--to", "hf:jane/open", "--public").exit_code == 0
    assert not hub.private["jane/open"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("export RUN", "FILE or --to must be given, and one of them, got neither."),
        ("export RUN x.jsonl --public", "--license and --public must come with --to, got a file."),
        ("export RUN --to run", "FILE must not exist, got 'run/README.md'. Choose another name, or overwrite"),
        ("export RUN --to run/README.md", "FOLDER must be writable, got 'run/README.md' (Not a directory)."),
        ("export RUN --to hf:jane/public", "hf:jane/public must be private, got a repository that is public."),
        ("export RUN --to hf:jane/full --public", "hf:jane/full must be public, got a repository that is private."),
        ("export RUN --to hf:jane/full", "hf:jane/full must hold no rows yet, got some."),
        ("export RUN --to hf:a/b/c", "hf:a/b/c must be a dataset repository that you may write, got HFValidationError"),
        ("import hf:jane/none RUN", "hf:jane/none must be a dataset repository that you may read, got Repository"),
        ("import hf:jane/full@v9 RUN", "hf:jane/full@v9 must be a dataset repository that you may read, got Re"),
        ("import hf:jane/public RUN", "hf:jane/public must hold files in .parquet, got none."),
    ],
)
def test_what_the_hub_or_a_folder_can_not_have_is_one_line(
    run: Path, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (run / "README.md").touch()
    commits = {name: len(made) for name, made in hub.commits.items()}
    result = ask(*(run if word == "RUN" else word for word in words.split()))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    assert result.stderr.startswith(f"agentloop: {message}")
    assert {name: len(made) for name, made in hub.commits.items()} == commits


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("HF_TOKEN", "another", "got HfHubHTTPError: Client error '401 Unauthorized'"),
        ("ENDPOINT", "http://127.0.0.1:9", "got ConnectError: "),
        ("HF_HUB_OFFLINE", True, "got HF_HUB_OFFLINE is set. "),
    ],
)
def test_hub_without_login_or_network_is_one_line(
    run: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, reason: str
) -> None:
    if name == "HF_TOKEN":
        monkeypatch.setenv(name, value)
    else:
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    result = ask("export", run, "--to", "hf:jane/new")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert f"you may write, {reason}" in result.stderr and "hf auth login" in result.stderr
    assert "jane/new" not in hub.private


def test_folder_is_read_by_datasets_and_comes_back(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    datasets = pytest.importorskip("datasets", reason="datasets is installed by make test")
    folder = tmp_path / "wins"
    with closing(ReplayStore.open(run / "replay.sqlite", read_only=True)) as store:
        export_folder(store, folder)
    assert (folder / "data/trajectories.parquet").read_bytes() == (tmp_path / "rows.parquet").read_bytes()
    found = datasets.load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))
    assert (found.num_rows, sum(found["success"])) == (21, 11)
    found.to_parquet(folder / "data/trajectories.parquet")
    with closing(ReplayStore.create(tmp_path / "back.sqlite")) as store:
        assert import_file(store, folder, name=None).inserted == 21
        export_file(store, tmp_path / "again.parquet")
    assert (tmp_path / "again.parquet").read_bytes() == (tmp_path / "rows.parquet").read_bytes()


def test_card_says_what_the_rows_are(tmp_path: Path) -> None:
    made = {"config": {"model": {"path": "/home/jane/small|one"}}, "fingerprint": {"model_family": "qwen2"}}
    with closing(new_store(tmp_path / "run.sqlite")) as store:
        store.add_run(replace(run_record("run-9"), **made))
        put(store, trajectory("t0"), trajectory("t1", run="run-9", group="g9", success=False, source="teacher"))
        export_folder(store, tmp_path / "wins", license="mit")
    _, head, text = (tmp_path / "wins/README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head)["license"] == "mit"
    assert [line for line in text.splitlines() if line.startswith("|")][2:] == [
        "| trajectories | 2 |",
        "| tasks | 1 |",
        "| successes | 1 |",
        "| tokens | 12, 6 of them sampled |",
        "| model | `small one (qwen2)`, `unknown (unknown)` |",
        "| tokenizer (sha256) | `tok`, `unknown` |",
        "| environment | `lookup_chain 1` |",
        "| source | `self`, `teacher` |",
        "| license | `mit` |",
    ]
