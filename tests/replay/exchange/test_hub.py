"""Folders and repositories of the hub, with its own client against a server that answers as the hub does."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from replay import ReplayStore
from replay.exchange import export_file, export_folder, import_file
from tests.fakes.hub_server import TOKEN, HubServer, served
from tests.fakes.records import RUN, a_run, new_store, put, session_row, trajectory
from tests.fakes.replay_command import ask
from tests.replay.exchange.test_exchange import filled

ROWS = "data/trajectories.parquet"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """20 rows of every shape, and an agent's session."""
    with closing(filled(new_store(tmp_path / "run.sqlite"))) as store:
        put(store, session_row("agent"))
        store.labels.add(["agent"], "good", by="mistress")
        store.labels.add([RUN], "baseline", by="mistress", on="run")
        export_file(store, tmp_path / "rows.parquet")
    return tmp_path / "run.sqlite"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The hub of commands in this process; jane has a public repository, and one with rows."""
    with served(HubServer()) as server:
        paths = {"ENDPOINT": "", "HUGGINGFACE_CO_URL_TEMPLATE": "/{repo_id}/resolve/{revision}/{filename}"}
        settings = {name: server.url + path for name, path in paths.items()}
        settings |= {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True, "HF_HUB_CACHE": str(tmp_path / "cache")}
        for name, value in settings.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        server.add("jane/public", {}, private=False)
        server.add("jane/full", {"data/old.parquet": b"rows"})
        yield server


def test_rows_on_the_hub_come_back_bit_by_bit(run: Path, hub: HubServer, tmp_path: Path) -> None:
    assert ask("export", run, "--to", "hf:wins").output.startswith("21 rows in hf:wins (")
    assert hub.private["jane/wins"]
    assert ask("export", run, "--to", "hf:open", "--public").exit_code == 0
    for name, labelled in (("jane/wins", True), ("jane/open", False)):
        files = hub.commits[name][-1][1]
        assert (b"labels and notes" in files["README.md"], b"mistress" in files[ROWS]) == (labelled, labelled)
    assert hub.commits["jane/wins"][-1][1][ROWS] == (tmp_path / "rows.parquet").read_bytes()
    hub.add("jane/wins", {"data/old.parquet": b"rows", "notes.txt": b"mine"})
    assert ask("export", run, "--to", "hf:jane/wins", "--force", "--where", "not success").exit_code == 0
    assert set(hub.commits["jane/wins"][-1][1]) == {"README.md", ROWS, "notes.txt"}
    with closing(ReplayStore.create(tmp_path / "back.sqlite")) as store:
        for name, count in ((f"hf:jane/wins@{hub.commits['jane/wins'][1][0]}", 21), ("hf:jane/wins", 0)):
            output = ask("import", name, tmp_path / "back.sqlite", "--keep-source").output
            assert output.startswith(f"{count} rows imported from {name}, ")
        export_file(store, tmp_path / "again.parquet")
    assert (tmp_path / "again.parquet").read_bytes() == (tmp_path / "rows.parquet").read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("export RUN", "FILE or --to must be given, and one of them, got neither."),
        ("export RUN x.jsonl --public", "--license and --public must come with --to, got a file."),
        ("export RUN --to .", "FILE must not exist, got 'README.md'. Choose another name, or overwrite"),
        ("export RUN --to README.md/a", "FOLDER must be writable, got 'README.md/a' (Not a directory)."),
        ("export RUN --to hf:jane/public", "hf:jane/public must be private, got a repository that is not."),
        ("export RUN --to hf:jane/full --public", "hf:jane/full must be public, got a repository that is not."),
        ("export RUN --to hf:jane/full", "hf:jane/full must hold no rows yet, got some."),
        ("export RUN --to hf:a/b/c", "hf:a/b/c must be a dataset repository that you may write, got HFValidationError"),
        ("import hf:jane/none RUN", "hf:jane/none must be a dataset repository that you may read, got Repository"),
        ("import hf:jane/public RUN", "hf:jane/public must hold files in .parquet, got none."),
    ],
)
def test_what_the_hub_or_a_folder_can_not_have_is_one_line(
    run: Path, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").touch()
    result = ask(*(run if word == "RUN" else word for word in words.split()))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    assert result.stderr.startswith(f"agentloop: {message}")
    assert {name: len(made) for name, made in hub.commits.items()} == {"jane/public": 1, "jane/full": 1}


def test_hub_without_login_or_network_is_one_line(run: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    for name, value, reason in (
        ("HF_TOKEN_PATH", "nowhere", "got HfHubHTTPError: Client error '401 Unauthorized'"),
        ("ENDPOINT", "http://127.0.0.1:9", "got ConnectError: "),
        ("HF_HUB_OFFLINE", True, "got HF_HUB_OFFLINE is set. "),
    ):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        result = ask("export", run, "--to", "hf:jane/new")
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
        assert f"you may write, {reason}" in result.stderr and "hf auth login" in result.stderr


def test_folder_is_read_by_datasets_and_comes_back(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    datasets = pytest.importorskip("datasets", reason="datasets is installed by make test")
    folder, made = tmp_path / "wins", {"model": {"path": "/home/jane/small|one"}}
    with closing(ReplayStore.open(run)) as store:
        store.add_run(replace(a_run("run-2"), config=made, fingerprint={"model_family": "qwen2"}))
        put(store, trajectory("other", run="run-2", group="g2"))
        export_folder(store, folder, license="mit")
        export_file(store, tmp_path / "rows.parquet", force=True)
    card = (folder / "README.md").read_text().splitlines()
    assert 'license: "mit"' in card and "| model | `small one (qwen2)`, `unknown (unknown)` |" in card
    found = datasets.load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))
    assert f"| successes | {sum(found['success'])} |" in card and "| trajectories | 22 |" in card
    found.to_parquet(folder / ROWS)
    with closing(ReplayStore.create(tmp_path / "back.sqlite")) as store:
        assert import_file(store, folder, name=None).inserted == 22
        export_file(store, tmp_path / "again.parquet")
    assert (tmp_path / "again.parquet").read_bytes() == (tmp_path / "rows.parquet").read_bytes()
